"""Which samples a forward has, which rows belong together, and where they go; no mathematics of layers."""
