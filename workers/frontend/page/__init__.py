"""The cluster's page: its files, and the feed that keeps it current."""
