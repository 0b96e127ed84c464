"""A whole cluster on this machine: its processes, watched; its ports; the flags that it hands on."""
