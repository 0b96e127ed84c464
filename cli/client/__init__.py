"""A client of a cluster's NATS API on the terminal."""
