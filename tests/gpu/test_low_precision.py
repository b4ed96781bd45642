"""Tests of trainings in FP8 and FP4 with Transformer Engine's own kernels. They were written
without a GPU, and have not run yet.

`tests/patches/layers/test_low_precision.py` tests on the CPU the order in which scales, histories
and copies of weights are read and written. These tests add the kernels, and reductions of amaxes
over ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.adapter.transformer_engine.installed import can_split
from tests.gpu.runs import GPUS, RANKS, losses, needs_two_gpus
from tests.gpu.te_layers import missing

pytestmark = [
    pytest.mark.gpu,
    needs_two_gpus,
    pytest.mark.skipif(not can_split(), reason="needs Transformer Engine 2.8 or later"),
]

Flags = dict[str, Any]

MODEL: Flags = {
    "transformer_impl": "transformer_engine",
    "bf16": True,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True,
}
HYBRID: Flags = {"fp8_format": "hybrid"}
# For each recipe: the precision as `te_layers` names it, and flags of a training.
PRECISIONS: dict[str, tuple[str, Flags]] = {
    "delayed": ("fp8 delayed", {**HYBRID, "fp8_recipe": "delayed"}),
    "tensorwise": ("fp8 current", {**HYBRID, "fp8_recipe": "tensorwise"}),
    "tensorwise, ends in bf16": (
        "fp8 current",
        {**HYBRID, "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
    ),
    "tensorwise, gathered": (
        "fp8 current",
        {
            **HYBRID,
            "fp8_recipe": "tensorwise",
            "fp8_param_gather": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "blockwise": ("fp8 blockwise", {**HYBRID, "fp8_recipe": "blockwise"}),
    "mxfp8": ("mxfp8", {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}),
    "mxfp8, output layer": (
        "mxfp8",
        {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True},
    ),
    "mxfp8, gathered": (
        "mxfp8",
        {
            "fp8_format": "e4m3",
            "fp8_recipe": "mxfp8",
            "fp8_param_gather": True,
            "reuse_grad_buf_for_mxfp8_param_ag": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
    "nvfp4": ("nvfp4", {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"}),
    "nvfp4, gathered": (
        "nvfp4",
        {
            "fp4_format": "e2m1",
            "fp4_recipe": "nvfp4",
            "fp4_param_gather": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
}

SAVED_AT = 2
# Settings of low precision that have no stand-in on the CPU, by the names in public recipes.
GATHERED: dict[str, Flags] = {
    "tensorwise, gathered": {"precision": "fp8_cs", "fp8_param_gather": True},
    "mxfp8, gathered": {
        "precision": "fp8_mx",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "nvfp4, gathered": {"precision": "nvfp4", "fp4_param_gather": True},
}


def cases(kind: str) -> list[Any]:
    """Return all precisions, with marks of the settings of public recipes that only this file
    shows."""
    return [
        pytest.param(name, marks=pytest.mark.covers("C", (kind,), **GATHERED[name]))
        if name in GATHERED
        else name
        for name in PRECISIONS
    ]


def flags_of(precision: str) -> Flags:
    recipe, flags = PRECISIONS[precision]
    if lack := missing(recipe):
        pytest.skip(lack)
    return MODEL | flags


@pytest.mark.parametrize("precision", cases("line"))
def test_one_stage_a_rank_has_stocks_losses(precision: str) -> None:
    flags = flags_of(precision)
    assert losses("zb-h1", **flags) == losses(None, **flags)


@pytest.mark.parametrize("precision", cases("loop"))
def test_a_loop_has_the_losses_of_megatrons_loop(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop schedule has the losses of Megatron's own loop. NVFP4 rounds gradients at random, in
    the order of a rank's backward passes, which is the same in both loops."""
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")
    flags = flags_of(precision) | {"num_virtual_stages_per_pipeline_rank": 2}
    assert losses("interleaved-zb", **flags) == losses(None, **flags)


@pytest.mark.parametrize("precision", cases("v"))
def test_a_v_has_stocks_losses(
    precision: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A V schedule has Megatron's losses from a checkpoint. From scratch it would start from other
    weights."""
    # Transformer Engine loads the state of delayed scaling only with this variable.
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")
    flags = flags_of(precision)
    resumed = {"load": str(tmp_path), "ckpt_step": SAVED_AT}
    losses(None, save=str(tmp_path), save_interval=SAVED_AT, **flags)
    assert losses("zb-v", **flags, **resumed) == losses(None, **flags, **resumed)


@pytest.mark.parametrize("precision", ["delayed", "tensorwise", "mxfp8"])
def test_tensor_parallel_ranks_agree_on_scales(precision: str) -> None:
    """Tensor-parallel ranks have equal scales in FP8: amaxes are reduced over the ranks of a stage,
    in F and in I."""
    if GPUS < 4:
        pytest.skip(f"a pipeline of two with tensor parallelism needs four GPUs, here are {GPUS}")
    flags = flags_of(precision) | {
        "pipeline_model_parallel_size": RANKS // 2,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
    }
    assert losses("zb-h1", **flags) == losses(None, **flags)
