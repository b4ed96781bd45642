"""Patches of megatron/core/models/gpt/gpt_model.py, a file for each subject."""
