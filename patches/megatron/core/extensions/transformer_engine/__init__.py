"""Patches of megatron/core/extensions/transformer_engine.py, one file per subject."""
