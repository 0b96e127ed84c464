"""The commands that need no cluster: `halfmoon simulate`, `capacity`, `size` and `experiments`."""
