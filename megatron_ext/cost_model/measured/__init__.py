"""What a training has measured of a model's layers, and estimates that are scaled to it."""
