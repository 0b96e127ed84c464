"""Engines of others as workers of a cluster: `halfmoon adapt vllm`. See `worker`."""
