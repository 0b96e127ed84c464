"""Systems of papers that are simulated beside halfmoon's own, and all of them by name."""
