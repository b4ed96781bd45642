"""Patches of Megatron's data loaders."""
