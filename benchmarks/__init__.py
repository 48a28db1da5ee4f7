"""What a step with per-sample gradients costs, here and in other libraries: `python -m benchmarks`."""
