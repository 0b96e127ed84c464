"""The store under engines of others: each adapter speaks one engine's interface and keeps that engine's blocks here."""
