"""Measurement of passes, messages and memory in real steps."""
