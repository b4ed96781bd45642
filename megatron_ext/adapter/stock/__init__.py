"""Megatron's own pipeline functions, run unchanged and observed."""
