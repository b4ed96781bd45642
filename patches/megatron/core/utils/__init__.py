"""Patches of megatron/core/utils.py, a file for each subject."""
