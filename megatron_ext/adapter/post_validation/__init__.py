"""Optimizer steps of Megatron that are taken before their validation, and rolled back if it
fails."""
