"""The prefill worker: computes the KVCache of prompts, layer by layer."""
