"""The cluster's edge: HTTP and NATS in, tokens out."""
