"""Patches of megatron/core/transformer/multi_token_prediction.py, one file per subject."""
