"""Blocks over RDMA, by pyverbs."""
