"""Activations that leave for the host's memory and come back."""
