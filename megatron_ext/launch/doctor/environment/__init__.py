"""Checks of the environment of a launch command: tools and compiled parts."""
