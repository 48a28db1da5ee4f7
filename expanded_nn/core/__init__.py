"""The algebra of rows: tensors in, tensors out. All of it can be traced."""
