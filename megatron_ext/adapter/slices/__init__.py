"""Megatron's model, called with a slice of a sequence at a time."""
