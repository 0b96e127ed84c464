"""The view of a conductor's state: for the cluster's page and for `halfmoon status`."""
