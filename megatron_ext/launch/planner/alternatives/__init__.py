"""Alternatives to a launch command, on the same GPUs.

Each module has one kind of change, compared with the unchanged launch and written as flags.
"""
