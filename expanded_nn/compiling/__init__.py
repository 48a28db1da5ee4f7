"""A whole step as one graph: what it depends on, how it is traced, and how its results come back."""
