"""Microbatches of a step, ordered and dealt before they are read."""
