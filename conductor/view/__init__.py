"""What the cluster's page and `halfmoon status` show of a conductor's state."""
