"""Copies to the host's memory and back, and the account of the host memory that they need."""
