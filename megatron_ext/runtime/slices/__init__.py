"""Passes over slices of a microbatch's sequence, which attend to earlier slices."""
