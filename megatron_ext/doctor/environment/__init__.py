"""Checks of what a launch line finds around it: tools and compiled parts."""
