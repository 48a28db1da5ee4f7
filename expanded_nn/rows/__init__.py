"""Rows by their factors: what they hold, their algebra, the operators that work on them."""
