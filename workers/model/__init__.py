"""The language model itself: files, tokenizer, forward pass, paged cache, sampling. It knows nothing of the
cluster.
"""
