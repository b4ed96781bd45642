"""Checks of a launch command without a GPU, and of the versions installed here."""
