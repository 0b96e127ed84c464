"""The papers' results by simulation: each experiment with its table and its plots."""
