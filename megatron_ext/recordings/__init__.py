"""Recordings of the ranks of a run, and the differences of two recordings."""
