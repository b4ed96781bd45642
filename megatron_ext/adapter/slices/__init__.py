"""Megatron's model, run on one slice of a sequence at a time."""
