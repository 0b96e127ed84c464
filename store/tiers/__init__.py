"""Slower and larger places for blocks than the pool's memory."""
