"""Measurements of a model's layers in a training, and estimates that are scaled to them."""
