"""Observers of training steps: traces, measured costs, the report on the split.

They watch steps of ours and of Megatron's own, and change nothing in them.
"""
