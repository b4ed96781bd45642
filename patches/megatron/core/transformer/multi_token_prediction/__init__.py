"""Patches of megatron/core/transformer/multi_token_prediction.py, a file for each subject."""
