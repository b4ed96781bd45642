"""Checks of the environment of a launch command: tools and compiled parts.

Each check is of something that Megatron needs only after all ranks have started.
"""
