"""What all folders stand on: the batch of a call, what torch is doing, running a forward again."""
