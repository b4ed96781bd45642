"""Megatron's optimizer steps before its step is validated, and takes it back if need be."""
