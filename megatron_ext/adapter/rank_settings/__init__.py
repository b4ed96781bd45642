"""Settings that all ranks of a launch must have in common."""
