"""Ordered messages between two workers: queries, partial states and activations, layer by layer."""
