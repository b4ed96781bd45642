"""Checks of a launch command without a GPU, and of the versions installed here.

A mistake that would end a launch after its wait for GPUs is found beforehand, on a login node.
"""
