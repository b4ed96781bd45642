"""Vocabulary parallelism: embedding and output layer sharded over all pipeline ranks."""
