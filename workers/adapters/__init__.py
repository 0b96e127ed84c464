"""Engines of others as workers of a cluster: `halfmoon adapt`. See `worker`."""
