"""The conductor's core, unchanged, over a world of simulated workers, stores and links."""
