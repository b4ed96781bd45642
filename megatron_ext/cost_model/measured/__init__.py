"""Measurements of a model's layers in a training, and estimates that are scaled to them. One layout
is measured; the ratios of measured to estimated costs also serve other layouts."""
