"""Checks of a launch command without a GPU, and of the versions installed here.

What would end a launch after it has waited for its GPUs is found before, on a login node.
"""
