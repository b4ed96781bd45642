"""Observers of training steps: traces, measured costs, and the report on how backward
passes were split into I and W.

They watch steps of ours and of Megatron's own, and change nothing in them.
"""
