"""A model's files: which they are, what they say the model is, and the weights in them. Begin at `files`."""
