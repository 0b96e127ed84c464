"""A recorded log: saved to a file, stepped over again and compared, explained, drawn."""
