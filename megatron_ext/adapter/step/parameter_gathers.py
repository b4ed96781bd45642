"""Parameters of the distributed optimizer, gathered ahead of the passes that read them.

With `align_param_gather` Megatron's hooks gather a bucket only when a pass needs it, and leave it
to the schedule to begin earlier: `config.param_sync_func` starts the gathers of a chunk. As with
stock's interleaved schedule those of the first two chunks begin before the passes, and those of
each other one when the chunk before it begins, here by the rank's own row of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_ext.schedule.action import Action, Kind


class ParameterGathers:
    """Those of one step on one rank."""

    def __init__(self, starts: Mapping[int, Callable[[], None]]) -> None:
        """``starts``: what starts the gathers of each stage, in the order in which they begin;
        empty where the step has none to start."""
        self._order = list(starts)
        self._starts = list(starts.values())
        self._started = 0

    def begin(self) -> None:
        """Before the passes."""
        self._start(2)

    def stage_begins(self, stage: int) -> None:
        """Before the first forward pass of ``stage``. Where a step begins again, what has been
        started is not started anew."""
        if self._starts:
            self._start(self._order.index(stage) + 2)

    def _start(self, count: int) -> None:
        for start in self._starts[self._started : count]:
            start()
        self._started = max(self._started, count)


def parameter_gathers(
    config: Any, chunks: Mapping[int, torch.nn.Module], row: Sequence[Action], forward_only: bool
) -> ParameterGathers:
    """The gathers of a step in which a rank follows ``row`` on its ``chunks``, by stage.

    Callers take the function out of the config and put it back between steps, so each step asks.
    """
    function = config.param_sync_func
    if function is None or forward_only:
        return ParameterGathers({})
    functions = function if isinstance(function, list) else [function] * len(chunks)
    starts = {
        stage: partial(_start, sync, chunk)
        for (stage, chunk), sync in zip(chunks.items(), functions, strict=True)
    }
    order = dict.fromkeys(action.stage for action in row if action.kind is Kind.FORWARD)
    return ParameterGathers({stage: starts[stage] for stage in order})


def _start(sync: Callable[..., None], chunk: torch.nn.Module) -> None:
    sync(chunk.parameters())
