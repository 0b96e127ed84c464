"""Attention for others: a worker attends to segments that it holds of sequences that are decoded elsewhere."""
