"""Patches of megatron/core/models/common/embeddings/rotary_pos_embedding.py, one file per
subject."""
