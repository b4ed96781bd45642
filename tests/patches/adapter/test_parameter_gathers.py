"""Tests of the time at which a step starts the parameter gathers of its chunks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.adapter.step.parameter_gathers import parameter_gathers
from megatron_ext.schedule.action import parse_action

ROW = [parse_action(text) for text in ("4F0", "4F1", "0F0", "2F0", "2I0", "0F1", "2F1", "0I0")]


def chunks() -> dict[int, torch.nn.Module]:
    return {stage: torch.nn.Linear(1, 1) for stage in (0, 2, 4)}


def config_that_notes(as_list: bool) -> tuple[Any, list[tuple[int, list[Any]]]]:
    calls: list[tuple[int, list[Any]]] = []

    def start(number: int, parameters: Any) -> None:
        calls.append((number, list(parameters)))

    functions = [partial(start, number) for number in range(3)]
    return SimpleNamespace(param_sync_func=functions if as_list else functions[0]), calls


@pytest.mark.parametrize("as_list", [True, False])
def test_a_chunks_gathers_start_before_the_chunk_before_it_begins(as_list: bool) -> None:
    """The parameter gathers of a chunk start before the passes of the preceding chunk begin. The
    row is that of a schedule file that begins with the rank's last chunk."""
    config, calls = config_that_notes(as_list)
    models = chunks()
    gathers = parameter_gathers(config, models, ROW, forward_only=False)
    counts = []
    gathers.begin()
    counts.append(len(calls))
    for stage in (4, 0, 2):
        gathers.stage_begins(stage)
        counts.append(len(calls))
    assert counts == [2, 2, 3, 3]
    assert [number for number, _ in calls] == ([2, 0, 1] if as_list else [0, 0, 0])
    for (_, parameters), stage in zip(calls, (4, 0, 2), strict=True):
        assert [map(id, parameters)] and parameters == list(models[stage].parameters())


def test_what_has_been_started_is_not_started_anew() -> None:
    """A step that restarts, after the verdict on the step before, does not start its parameter
    gathers twice."""
    config, calls = config_that_notes(as_list=True)
    gathers = parameter_gathers(config, chunks(), ROW, forward_only=False)
    for _ in range(2):
        for stage in (4, 0, 2):
            gathers.stage_begins(stage)
    assert [number for number, _ in calls] == [2, 0, 1]


def test_an_evaluation_starts_none_nor_does_a_step_without_the_function() -> None:
    config, calls = config_that_notes(as_list=True)
    for forward_only in (True, False):
        gathers = parameter_gathers(config, chunks(), ROW, forward_only)
        gathers.begin()
        gathers.stage_begins(0)
        config.param_sync_func = None
    assert not calls
