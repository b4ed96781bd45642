"""Tests of trainings with activation offload, compared with the same trainings without it, to the
last bit.

Stages are on the same ranks in both trainings, so both draw the same weights and dropout. (Other
tests compare a schedule without offload with stock.)
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers, random
from torch import Tensor

from megatron_ext.features.offload.runtime import offload
from megatron_ext.features.offload.runtime.offload import OffloadedStep
from megatron_ext.runtime.host import host_memory as host_memory
from megatron_ext.schedule.kinds import Held
from tests.helpers.combinations import at_night
from tests.helpers.megatron_runs import (
    Run,
    evaluations,
    losses,
    model_flags,
    train,
    train_or_fail,
)
from tests.helpers.trainings import Training

COSTS = "f=10,i=12,w=8,comm=1,d2h=3,h2d=3"
DROPOUT: dict[str, object] = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
# Each of two pipeline ranks has two layers, as many as in cases whose ranks are all one pipeline.
PIPELINES_OF_TWO: dict[str, object] = {"pipeline_model_parallel_size": 2, "num_layers": 4}

# Each case is a schedule, its modes of offload, the number of ranks, and flags of both runs.
CASES: dict[str, tuple[str, tuple[str, ...], int, dict[str, object]]] = {
    "gis": ("gis", ("full", *at_night("half"), "fit"), 2, {}),
    "gis-h": ("gis-h", at_night("full"), 4, {}),
    "interleaved, dropout": ("interleaved", at_night("full"), 2, DROPOUT),
    "zb-v, evaluation, dropout": (
        "zb-v",
        ("full", "half"),
        2,
        {"eval_interval": 1, "eval_iters": 1, **DROPOUT},
    ),
    "v-half, untied": (
        "v-half",
        at_night("full"),
        2,
        {"untie_embeddings_and_output_weights": True},
    ),
    # This case runs at night. By day zb-v runs here with offload, and test_dynamic_batches.py
    # trains v-auto.
    **dict(at_night(("v-auto, odd", ("v-auto", ("full",), 3, {})))),
    "1f1b": ("1f1b", at_night("full"), 2, {}),
    "zb-h1, batched": ("zb-h1", ("full",), 2, {"pipeline_p2p": "batched"}),
    "full recompute, dropout": (
        "1f1b",
        ("full",),
        2,
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            **DROPOUT,
        },
    ),
    "selective recompute": (
        "zb-v",
        ("full",),
        2,
        {"recompute_granularity": "selective", "recompute_modules": "layernorm"},
    ),
    "bf16, reduction overlapped": (
        "zb-h1",
        ("full",),
        4,
        {**PIPELINES_OF_TWO, "bf16": True, "overlap_grad_reduce": True},
    ),
    "tensor and sequence parallel": (
        "zb-h1",
        ("full",),
        4,
        {
            **PIPELINES_OF_TWO,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "global_batch_size": 4,
        },
    ),
    "divided vocabulary": ("zb-v", ("full",), 2, {"pipeline_vocab_parallel": 2}),
    "divided vocabulary, 1f1b": ("1f1b", at_night("full"), 3, {"pipeline_vocab_parallel": 1}),
    "slices": ("1f1b", at_night("full", "half"), 2, {"pipeline_slices": 4}),
    "slices, zb-v": (
        "zb-v",
        at_night("full"),
        2,
        {"pipeline_slices": 2, "pipeline_slice_lengths": "balanced"},
    ),
    "experts": (
        "zb-h1",
        ("full",),
        2,
        {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True},
    ),
}


@pytest.fixture(autouse=True)
def transformer_engine_says_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Megatron stand-ins for Transformer Engine's functions. Megatron's recompute of single
    modules calls them, even if Transformer Engine is not installed."""
    stand_ins = {
        "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False),
        "activation_recompute_forward": lambda **phase: contextlib.nullcontext(),
        "fp8_autocast": lambda **settings: contextlib.nullcontext(),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(random, name, stand_in, raising=False)


@functools.cache
def without(case: str) -> list[Run]:
    schedule, _, ranks, flags = CASES[case]
    return train(ranks, words(ranks, flags, schedule))


def words(ranks: int, flags: Mapping[str, object], schedule: str, **more: object) -> list[str]:
    text: dict[str, object] = {
        "num_layers": 2 * ranks,
        "pipeline_model_parallel_size": ranks,
        "global_batch_size": 2 * ranks,
        "pipeline_schedule": schedule,
        "pipeline_costs": COSTS,
        "train_iters": 2,
    }
    return model_flags(**{**text, **flags, **more})


def watch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make ranks that are forked from now on write the offloaded bytes of each step to
    ``folder``."""
    monkeypatch.setattr(offload, "SMALL", 0)
    finish = OffloadedStep.finish

    def finished(self: OffloadedStep) -> None:
        finish(self)
        kept = self._offload
        left = {held.value: 0 for held in Held}
        for (_, held), size in kept.bytes_left.items():
            left[held.value] += size
        with (folder / str(kept.rank)).open("a") as file:
            file.write(json.dumps([left, kept.buffers.plain, kept.buffers.registered]) + "\n")

    monkeypatch.setattr(OffloadedStep, "finish", finished)


def steps(folder: Path) -> list[list[tuple[dict[str, int], int, int]]]:
    """Return the records that `watch` has written, by rank."""
    files = sorted(folder.iterdir())
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize(
    ("case", "way"), [(case, way) for case, (_, ways, *_) in CASES.items() for way in ways]
)
def test_training_is_the_same_to_the_last_bit(
    case: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, _, ranks, flags = CASES[case]
    reference = without(case)
    watch(monkeypatch, tmp_path)
    limit = "0.75x" if way == "fit" else None
    ours = {"pipeline_activation_offload": way, "pipeline_memory_limit": limit}
    runs = train(ranks, words(ranks, flags, schedule, **ours))
    assert len(losses(runs)) == 2
    assert losses(runs) == losses(reference)
    assert evaluations(runs) == evaluations(reference)
    # The states, with parameters and Adam's tensors, are equal.
    assert [run.state for run in runs] == [run.state for run in reference]
    assert bool(evaluations(runs)) == ("eval_interval" in flags)
    seen = steps(tmp_path)
    print(case, way, seen)
    assert any(left["activation"] for rank in seen for left, *_ in rank)
    if schedule in ("gis", "gis-h", "zb-h1", "v-half", "v-auto"):
        assert any(left["weight inputs"] for rank in seen for left, *_ in rank)
    for rank in seen:  # these costs give no bytes, so the first step shows the sizes of buffers
        (plain,) = {plain for _, plain, _ in rank}
        registered = {registered for *_, registered in rank}
        # Slices of a sequence differ in size, so two may share the buffer of a larger one in some
        # steps.
        assert registered == {0, plain} or ("pipeline_slices" in flags and max(registered) > 0)


def test_a_limit_with_copies_and_an_evaluation_of_one_microbatch() -> None:
    """The schedule zb-auto trains with offload within a memory limit, with an evaluation of one
    microbatch. With offload its first step used to end in a traceback, because the family ignored
    the limit. A limit of 0.6x (60 % of 1F1B's peak) came to 0.6 microbatches in that evaluation,
    which used to end the training."""
    sizes: dict[str, object] = {
        "pipeline_model_parallel_size": 2,
        "global_batch_size": 8,
        "train_iters": 2,
        "eval_iters": 1,
        "eval_global_batch_size": 1,
    }
    ours = {
        "pipeline_schedule": "zb-auto",
        "pipeline_memory_limit": "0.6x",
        "pipeline_activation_offload": "half",
        "pipeline_costs": COSTS,
    }
    assert evaluations(Training(2, sizes).start_as_stock(**ours))


def fused(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build a model whose linear layers add weight gradients to main_grad by a fused kernel."""
    from megatron.training import get_args
    from megatron.training.argument_utils import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    config.gradient_accumulation_fusion = True
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def add_product(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
    main_grad.add_(dy.t().matmul(x))


@pytest.mark.parametrize("schedule", ["1f1b", *at_night("zb-h1", "interleaved")])
def test_gradients_that_a_kernel_adds_need_no_gradient_from_autograd(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainings with offload equal those without it if a fused kernel adds weight gradients to
    main_grad. While copies are planned, autograd returns another object for each saved tensor.
    Megatron's layer used to mark that object, and not its weight, as one whose gradient is in
    main_grad, and to give autograd no gradient; with overlapped reductions Megatron's hook then
    ended the training. Under split backward passes the output layer's weight is the only one that
    autograd saves."""
    kernels = SimpleNamespace(wgrad_gemm_accum_fp32=add_product, wgrad_gemm_accum_fp16=add_product)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernels, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    flags = {**PIPELINES_OF_TWO, "bf16": True, "overlap_grad_reduce": True}
    reference = train(4, words(4, flags, schedule), model_provider=fused)
    watch(monkeypatch, tmp_path)
    leaves = words(4, flags, schedule, pipeline_activation_offload="full")
    runs = train(4, leaves, model_provider=fused)
    assert len(losses(runs)) == 2
    assert losses(runs) == losses(reference)
    assert [run.state for run in runs] == [run.state for run in reference]
    assert any(left["activation"] for rank in steps(tmp_path) for left, *_ in rank)


def test_host_memory_is_checked_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host memory that offload needs is added up over all ranks of a host before the first
    step. If it is too little, every rank reports that."""
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    flags = words(2, {}, "gis", pipeline_costs="estimate", pipeline_activation_offload="full")
    results = train_or_fail(2, flags)
    for result in results:
        assert result.exit_code == 1
        assert "2 ranks need" in result.error and "offload less" in result.error
        assert "in 0F0" not in result.error


def test_what_offload_takes_is_said_and_made_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The amount of host memory for offload is logged, and the memory allocated, before the first
    step if costs give bytes. Otherwise the first step measures the bytes, and the memory is
    allocated before the second step."""
    watch(monkeypatch, tmp_path)
    ours = {"pipeline_costs": "estimate", "pipeline_activation_offload": "full", "train_iters": 3}
    train(2, words(2, {}, "gis", **ours))
    for rank in steps(tmp_path):
        first, second, third = (registered for *_, registered in rank)
        assert 0 < first < second == third
        assert not any(plain for _, plain, _ in rank)
    text = capfd.readouterr().out
    said = [
        text.index(words)
        for words in ("; offload full: ", "offload: up to ", "iteration        1/")
    ]
    assert said == sorted(said)
    assert text.count("offload: up to ") == 1
