"""The command line: the composition root, the one place that may import everything."""
