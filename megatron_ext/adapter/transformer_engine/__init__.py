"""Capabilities of Transformer Engine, and its requirements on a schedule."""
