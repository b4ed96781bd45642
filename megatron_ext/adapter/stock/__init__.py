"""Megatron's own pipeline functions, run unchanged and observed.

Traces, metrics and comparisons need them as the baseline: what a training has before it uses our
schedules.
"""
