"""Layers of one prompt in several prefill workers: the orders of a stage, its computation, and the group around it."""
