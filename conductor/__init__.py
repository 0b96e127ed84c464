"""The conductor: a deterministic core (`machine` and what it imports) and its shells (`live`)."""
