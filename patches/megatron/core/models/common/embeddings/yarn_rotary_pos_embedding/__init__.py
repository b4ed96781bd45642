"""Patches of megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py, one file per
subject."""
