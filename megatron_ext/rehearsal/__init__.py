"""Rehearsal of a pipeline: each rank runs alone, and the simulator composes the whole step."""
