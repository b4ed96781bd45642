"""Megatron's own pipeline functions, run as they are and watched."""
