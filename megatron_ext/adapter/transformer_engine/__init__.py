"""Capabilities of Transformer Engine, and its requirements on a schedule.

It may be missing or old, it captures CUDA graphs in one fixed order, and its layers defer weight
gradients in a way of their own.
"""
