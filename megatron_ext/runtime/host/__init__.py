"""Copies to the host's memory and back, and the account of what they take there."""
