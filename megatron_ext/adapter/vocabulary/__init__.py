"""Vocabulary parallelism in Megatron's terms: its rows of a rank, and its hooks."""
