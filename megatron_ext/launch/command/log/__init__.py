"""The launch of a training, read from its log."""
