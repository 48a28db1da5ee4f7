"""One file per family of layers: the autograd Function, the functional op, the module, in that order."""
