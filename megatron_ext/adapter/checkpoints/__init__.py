"""Checkpoints: what they hold, and whether a command loads them."""
