"""The mixed worker: prompts and answers in one loop, by chunks under a token budget."""
