"""Tests of the random states that a restarted step restores."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

from megatron_ext.features.post_validation.adapter.restartable_step import (
    _random_states,
    _restore,
)
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.ranks import run_ranks, values

NAME = "model-parallel-rng"


def draw_from_states(tracker: CudaRNGStatesTracker) -> torch.Tensor:
    """Draw as under Megatron's random tracker: a state is a tensor, which is replaced after each
    draw."""
    with tracker.fork(NAME):
        return torch.rand(4)


def draw_from_generators(tracker: CudaRNGStatesTracker) -> torch.Tensor:
    """Draw as with --te-rng-tracker: a state is a generator, which draws by itself."""
    return torch.rand(4, generator=tracker.states_[NAME])


def tensor() -> torch.Tensor:
    return torch.Generator().manual_seed(1).get_state()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("made", "draw"), [(tensor, draw_from_states), (generator, draw_from_generators)]
)
def test_what_was_drawn_is_drawn_again(
    made: Callable[[], object], draw: Callable[[CudaRNGStatesTracker], torch.Tensor]
) -> None:
    """A restarted step draws the same random numbers as its first start. With --te-rng-tracker the
    generators used to be saved and not their states, so a restarted step had another dropout."""

    def run(rank: int) -> None:
        apply(cpu.patches())
        tracker = get_cuda_rng_tracker()
        tracker.states_ = {NAME: made()}

        def draw_all() -> list[object]:
            drawn = draw(tracker), torch.rand(4)
            return [random.random(), np.random.rand(), *(t.tolist() for t in drawn)]

        draw_all()
        states = _random_states()
        drawn = [draw_all(), draw_all()]
        for _ in range(2):  # restoring twice has the same result
            _restore(states)
            assert [draw_all(), draw_all()] == drawn

    values(run_ranks(1, run, connect=False))
