"""The APIs of engines of others, over HTTP: what is asked of them, and what they answer."""
