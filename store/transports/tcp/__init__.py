"""Blocks over TCP: authenticated, and encrypted between hosts."""
