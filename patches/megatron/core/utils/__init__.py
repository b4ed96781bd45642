"""Patches of megatron/core/utils.py, one file per subject."""
