"""KV of a prompt that is alike but not equal, in place of computing it: SemShareKV (arXiv 2509.24832)."""
