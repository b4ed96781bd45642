"""Measurements of a model's layers in a training, and estimates that are scaled to them. A
measurement is of one layout; its scale serves others."""
