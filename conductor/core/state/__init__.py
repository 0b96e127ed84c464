"""The state of the core: plain values, and the arithmetic on them. Begin at `core_state`."""
