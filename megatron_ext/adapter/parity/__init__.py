"""What a training comes to, recorded as it runs: losses, norms, and tensors by name."""
