"""Low-rank adapters beside frozen linear layers, as Megatron-Bridge's LoRA puts them.

Only the adapters' weight gradients wait for W. Losses and gradients are stock's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.build.registry import choose
from tests.helpers import callers
from tests.helpers.callers import assert_same, draw_by_name, named_parameters
from tests.helpers.combinations import at_night
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.test_callers import (
    BATCH,
    SEQUENCE,
    V_RANKS,
    build_chunks,
    forward_step,
    tokens,
)

LINEAR = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
RANK = 4  # of an adapter's matrices


class Adapter(torch.nn.Module):
    """As Bridge's ParallelLinearAdapter."""

    def __init__(self, wide: int, out: int, config: TransformerConfig) -> None:
        super().__init__()
        init = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
        self.linear_in = ColumnParallelLinear(wide, RANK, gather_output=True, **init)
        self.linear_out = ColumnParallelLinear(RANK, out, **init)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_out(self.linear_in(x)[0])[0]


class Adapted(torch.nn.Module):
    """As Bridge's LoRALinear."""

    def __init__(self, to_wrap: Any, config: TransformerConfig) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        out, wide = to_wrap.weight.shape
        self.adapter = Adapter(wide, out, config)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = self.to_wrap(x)
        return output + self.adapter(x), bias


def is_adapter(name: str) -> bool:
    return ".adapter." in name


def of_later_layers(name: str) -> bool:
    """Adapters, but for those of the first three layers."""
    return is_adapter(name) and int(name.split(".")[2]) > 3


def build(layout: list[list[str]], is_trained: Callable[[str], bool]) -> list[torch.nn.Module]:
    chunks: list[Any] = build_chunks(layout)
    for chunk in chunks:
        for module in list(chunk.decoder.modules()):
            for name in LINEAR:
                if hasattr(module, name):
                    setattr(module, name, Adapted(getattr(module, name), chunk.config))
        draw_by_name(named_parameters(chunk))
        for name, weight in named_parameters(chunk):
            weight.requires_grad = is_trained(name)
    return chunks


LINE = [["embedding", "decoder", "decoder", "decoder"], ["decoder", "decoder", "decoder", "loss"]]
FOUR = [["embedding", "decoder"], ["decoder", "decoder"], ["decoder"], ["decoder"] * 2 + ["loss"]]
LAYOUTS = {"zb-h1": LINE, "1f1b": LINE, "interleaved-zb": FOUR, "zb-v": FOUR, "v-half": FOUR}


def step(layout: list[list[str]], is_trained: Callable[[str], bool]) -> Any:
    return callers.whole_step(
        partial(build, layout, is_trained),
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


TRAINED = {"adapters": is_adapter, "adapters of the last layers": of_later_layers}

BY_DAY = {
    "adapters": ("zb-h1", "interleaved-zb", "zb-v"),
    "adapters of the last layers": ("zb-h1",),
}
BY_NIGHT = {
    "adapters": ("1f1b", "v-half"),
    "adapters of the last layers": ("1f1b", "interleaved-zb", "zb-v"),
}


@pytest.mark.parametrize(("trained", "schedules"), [*BY_DAY.items(), *at_night(*BY_NIGHT.items())])
def test_adapters_train_as_stocks(trained: str, schedules: tuple[str, ...]) -> None:
    """With those of the last layers alone the first stage of a line has no backward pass."""
    is_trained = TRAINED[trained]

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step(LINE, is_trained)
            for schedule in schedules:
                queue.weights = set()
                with megatron_ext.install(schedule=schedule):
                    ours = step(LAYOUTS[schedule], is_trained)
                put_off, queue.weights = queue.weights, None
                assert_same(ours, expected)
                assert all(is_adapter(name) for name in ours[1])
                shapes = {tuple(weight.shape) for weight in put_off}
                assert shapes <= shapes_of_adapters()
                if is_trained is is_adapter:
                    assert bool(shapes) == choose(schedule).splits_backward

    values(run_ranks(V_RANKS, on_rank))
