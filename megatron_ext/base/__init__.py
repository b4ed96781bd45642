"""Errors, the log, words, files and progress, for every package.

It imports nothing else of ours, and neither torch nor Megatron.
"""
