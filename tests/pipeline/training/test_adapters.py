"""Tests of low-rank adapters (LoRA) on frozen linear layers, as Megatron-Bridge adds them.

Under split backward passes only the adapters' weight gradients wait for W. Losses and gradients are
stock Megatron's to the last bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_ext
from megatron_ext.adapter.model_parts import chunk_size
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.compile.registry import choose
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.runtime.held_bytes import SavedTensors
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import line
from tests.helpers import callers
from tests.helpers.adapters import (
    LINEAR,
    RANK,
    above_frozen_layers,
    adapt,
    is_adapter,
    layer_of,
)
from tests.helpers.callers import assert_same, draw_by_name, named_parameters
from tests.helpers.combinations import at_night, nightly
from tests.helpers.covers.marks import kinds
from tests.helpers.estimated import costs_of_model
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.callers.test_callers import (
    BATCH,
    RANKS,
    SEQUENCE,
    V_RANKS,
    build_chunks,
    build_model,
    forward_step,
    tokens,
)


def of_later_layers(name: str) -> bool:
    """Return whether the parameter ``name`` is an adapter's in a layer after the third."""
    return is_adapter(name) and layer_of(name) > 3


def build(
    layout: list[list[str]], is_trained: Callable[[str], bool], recompute: bool, depths: int | None
) -> list[torch.nn.Module]:
    chunks: list[Any] = build_chunks(layout, depths=depths)
    for chunk in chunks:
        if recompute:
            chunk.config.recompute_granularity = "full"
            chunk.config.recompute_method, chunk.config.recompute_num_layers = "uniform", 1
        adapt(chunk)
        draw_by_name(named_parameters(chunk))
        for name, weight in named_parameters(chunk):
            weight.requires_grad = is_trained(name)
    return chunks


LINE = [["embedding", "decoder", "decoder", "decoder"], ["decoder", "decoder", "decoder", "loss"]]
FOUR = [["embedding", "decoder"], ["decoder", "decoder"], ["decoder"], ["decoder"] * 2 + ["loss"]]
LAYOUTS = {"zb-h1": LINE, "1f1b": LINE, "interleaved-zb": FOUR, "zb-v": FOUR, "v-half": FOUR}


def step(
    layout: list[list[str]],
    is_trained: Callable[[str], bool],
    recompute: bool = False,
    depths: int | None = None,
) -> Any:
    return callers.whole_step(
        partial(build, layout, is_trained, recompute, depths),
        named_parameters,
        forward_step,
        tokens,
        chunks=len(layout) // V_RANKS if len(layout) > V_RANKS else None,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )


def shapes_of_adapters() -> set[tuple[int, ...]]:
    width = 16
    inputs, outputs = (width, 4 * width), (3 * width, width, 4 * width)
    return {(RANK, wide) for wide in inputs} | {(out, RANK) for out in outputs}


TRAINED = {
    "adapters": is_adapter,
    "adapters of the last layers": of_later_layers,
    "all above frozen layers": above_frozen_layers,
}

BY_DAY = {
    ("adapters", False): ("zb-h1", "interleaved-zb", "zb-v"),
    ("adapters of the last layers", True): ("zb-h1", "zb-v"),
}
BY_NIGHT = {
    ("adapters", False): ("1f1b", "v-half"),
    ("adapters of the last layers", True): ("1f1b", "interleaved-zb", "v-half"),
    ("adapters of the last layers", False): tuple(LAYOUTS),
    ("all above frozen layers", True): tuple(LAYOUTS),
    ("all above frozen layers", False): tuple(LAYOUTS),
}


def compared() -> list[tuple[str, tuple[str, ...]]]:
    """Return the trained parts, in words, each with the schedules that it is tested under."""
    names: dict[str, dict[str, None]] = {}
    for cases in (BY_DAY, BY_NIGHT):
        for (trained, recompute), schedules in cases.items():
            what = f"{trained}, all layers recomputed" if recompute else trained
            names.setdefault(what, {}).update(dict.fromkeys(schedules))
    return [(what, tuple(schedules)) for what, schedules in names.items()]


@contextlib.contextmanager
def gradients_of_inputs() -> Iterator[dict[int, bool]]:
    """Yield a dictionary that says, for each stage that had backward passes, whether it computed
    the gradient of its input."""
    made: dict[int, bool] = {}
    run = ModelStage._backward_input

    def noting(stage: Any, *args: Any, **more: Any) -> torch.Tensor | None:
        gradient = run(stage, *args, **more)
        made[stage._number] = gradient is not None
        return gradient

    with mock.patch.object(ModelStage, "_backward_input", noting):
        yield made


def covers(trained: str, recompute: bool, schedules: tuple[str, ...]) -> pytest.MarkDecorator:
    settings = {"peft": "lora"} if "adapters" in trained else {}
    full = {"recompute_granularity": "full", "recompute_method": "uniform"} if recompute else {}
    return pytest.mark.covers("A", kinds(schedules), **settings, **full)


@pytest.mark.parametrize(
    ("trained", "recompute", "schedules"),
    [
        pytest.param(trained, recompute, names, marks=covers(trained, recompute, names))
        for (trained, recompute), names in [*BY_DAY.items(), *at_night(*BY_NIGHT.items())]
    ],
)
def test_adapters_train_as_stocks(
    trained: str, recompute: bool, schedules: tuple[str, ...]
) -> None:
    """A model whose adapters alone are trained gets stock's losses and gradients. Stages before the
    first trained layer run no backward passes.

    The first trained stage computes no gradient of its input, unless its layers are recomputed: a
    recomputed layer is differentiated only if its input requires a gradient. Otherwise the adapters
    in that layer would get no gradients, without an error.
    """
    is_trained = TRAINED[trained]

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step(LINE, is_trained, recompute)
            for schedule in schedules:
                queue.weights = set()
                with megatron_ext.install(schedule=schedule), gradients_of_inputs() as made:
                    ours = step(LAYOUTS[schedule], is_trained, recompute)
                put_off, queue.weights = queue.weights, None
                assert_same(ours, expected)
                assert all(is_trained(name) for name in ours[1])
                stages = choose(schedule).place(V_RANKS)
                first = 0 if is_trained is is_adapter else stages.stages // 2
                assert made == {
                    stage: stage > first or (recompute and stage > 0)
                    for stage in stages.stages_of[rank]
                    if stage >= first
                }
                if is_trained is not above_frozen_layers:
                    shapes = {tuple(weight.shape) for weight in put_off}
                    assert shapes <= shapes_of_adapters()
                if is_trained is is_adapter:
                    assert bool(shapes) == choose(schedule).traits.splits_backward

    values(run_ranks(V_RANKS, on_rank))


def held_with(linear: Sequence[str]) -> tuple[float, float]:
    """Return the bytes that one microbatch stores in a model with adapters on ``linear``: counted,
    and estimated."""
    model: Any = build_model()
    adapt(model, linear)
    for name, weight in named_parameters(model):
        weight.requires_grad = is_adapter(name)
    counting, data = SavedTensors(model.parameters()), iter(tokens())
    kept = []
    for k in range(2):
        with counting.around(Action(0, Kind.FORWARD, k)):
            kept.append(forward_step(data, model))
    size = chunk_size(model)
    costs = costs_of_model(model.config, line(1), [size], SEQUENCE, BATCH)
    assert costs.held_bytes is not None
    return counting.per_microbatch()[0, Held.ACTIVATION], costs.held_bytes[Held.ACTIVATION][0]


def test_adapters_of_some_linear_layers_hold_what_enters_these_alone() -> None:
    """Linear layers with adapters store their inputs for the backward pass, frozen ones without
    adapters do not. The memory estimate used to count the inputs of all linear layers."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(0)
            (counted, estimated), (of_less, estimated_less) = map(held_with, (LINEAR, LINEAR[:1]))
            parallel_state.destroy_model_parallel()
        # bytes of the inputs of the adapters' second matrices
        adapters = RANKS * 3 * RANK * SEQUENCE * BATCH * 4
        assert estimated - estimated_less == counted - of_less - adapters > 0

    values(run_ranks(1, on_rank))


@nightly("what is frozen is frozen above, and what predicts is test_multi_token_prediction.py's")
@pytest.mark.covers("A", ("line", "v"), mtp_num_layers=1)
def test_multi_token_prediction_above_frozen_layers() -> None:
    """Multi-token prediction trains above frozen layers. The last stage's copy of the embedding is
    frozen, because the embedding on the first stage is."""

    def predicting(layout: list[list[str]]) -> list[list[str]]:
        return [*layout[:-1], [*layout[-1][:-1], "mtp", "loss"]]

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step(predicting(LINE), above_frozen_layers, depths=1)
            for schedule in ("zb-h1", "zb-v"):
                with megatron_ext.install(schedule=schedule), gradients_of_inputs() as made:
                    ours = step(predicting(LAYOUTS[schedule]), above_frozen_layers, depths=1)
                assert_same(ours, expected)
                assert min(made, default=1) > 0

    values(run_ranks(V_RANKS, on_rank))
