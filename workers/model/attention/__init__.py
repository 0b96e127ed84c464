"""Attention over the paged cache: the interface (`kernel`), its implementations, and the states that merge."""
