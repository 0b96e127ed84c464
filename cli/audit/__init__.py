"""`halfmoon audit`: cached blocks are computed again, and their bits compared."""
