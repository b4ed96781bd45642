"""Embedding and output layer divided over all ranks."""
