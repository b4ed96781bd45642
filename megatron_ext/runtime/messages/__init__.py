"""Tensors between ranks: channels, batches, collectives, and the groups below them."""
