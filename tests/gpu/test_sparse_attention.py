"""Tests of sparse attention with an indexer (DSA), whose rotation is a kernel that no CPU runs.
They have not run yet.

scripts/gpu_tests.sh        # on a node with two GPUs or more
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.runs import losses, needs_two_gpus


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


pytestmark = [
    pytest.mark.gpu,
    needs_two_gpus,
    pytest.mark.skipif(
        is_missing("transformer_engine"), reason="the model's layers need Transformer Engine"
    ),
    pytest.mark.skipif(
        is_missing("fast_hadamard_transform"), reason="the indexer needs fast_hadamard_transform"
    ),
]

DSA: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 4,
    "dsa_indexer_head_dim": 64,
    "dsa_indexer_topk": 8,
    "dsa_indexer_loss_coeff": 0.01,
    "dsa_indexer_use_sparse_loss": True,
}
MODEL: dict[str, Any] = {
    **DSA,
    "transformer_impl": "transformer_engine",
    "multi_latent_attention": True,
    "hidden_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "no_rope_fusion": True,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "bf16": True,
}
SAVED_AT = 2


@pytest.mark.covers("C", ("line", "loop", "v"), **DSA)
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb", "zb-v"])
def test_losses_are_stocks(schedule: str, tmp_path: Path) -> None:
    """Models with sparse attention have Megatron's losses. They start from a checkpoint of
    Megatron's own training, since with several stages on a rank a run from scratch starts from
    other weights."""
    losses(None, **MODEL, save=str(tmp_path), save_interval=SAVED_AT)
    resumed: dict[str, Any] = {**MODEL, "load": str(tmp_path), "ckpt_step": SAVED_AT}
    assert losses(schedule, **resumed) == losses(None, **resumed)
