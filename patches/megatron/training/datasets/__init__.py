"""Patches of Megatron's data loaders: the order in which samples come, and the rank that reads
them."""
