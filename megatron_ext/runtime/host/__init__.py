"""Offload of activations to the host's memory and back."""
