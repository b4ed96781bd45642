"""Passes over slices of a microbatch's sequence, which attend to earlier slices.

The runtime runs one slice at a time, and knows which one it is.
"""
