"""The ends that clients reach: HTTP and NATS."""
