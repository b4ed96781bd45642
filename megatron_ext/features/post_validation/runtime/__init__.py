"""Optimizer steps that can be rolled back: their messages and their snapshots."""
