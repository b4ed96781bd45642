"""Results of a training, recorded as it runs: losses, norms, and tensors by name."""
