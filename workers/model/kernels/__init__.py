"""Kernels that are compiled for this CPU: products, attention of a step, and what is between them."""
