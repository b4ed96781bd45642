"""Alternatives to a launch command, on the same GPUs."""
