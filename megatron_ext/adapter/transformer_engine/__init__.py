"""Capabilities of Transformer Engine, and its requirements on a schedule.

The package may be missing or old. It captures CUDA graphs in one fixed order, and its layers have
their own mechanism to defer weight gradients.
"""
