"""Patches of megatron/core/models/gpt/gpt_model.py, one file per subject."""
