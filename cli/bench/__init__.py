"""`halfmoon bench`: load on a live cluster, and what came of it."""
