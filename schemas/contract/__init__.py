"""The contract between processes: what travels on which subject, and whose word it is."""
