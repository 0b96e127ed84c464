"""The processes that serve requests: prefill and decode workers, the frontend, and the model they run."""
