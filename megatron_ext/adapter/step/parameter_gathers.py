"""Parameter gathers of the distributed optimizer, started ahead of the passes that read them.

With `align_param_gather` Megatron's hooks gather a bucket only when a pass needs it, and the
schedule starts gathers earlier: `config.param_sync_func` starts those of a chunk. As in Megatron's
interleaved schedule, the gathers of the first two chunks start before the passes, and those of each
other chunk when the chunk before it begins, here in the order of the rank's row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_ext.schedule.action import Action, Kind


class ParameterGathers:
    """Starts of the distributed optimizer's parameter gathers in one step on one rank."""

    def __init__(self, starts: Mapping[int, Callable[[], None]]) -> None:
        """Initialise the gathers of a step.

        ``starts`` has, by stage, a function that starts the stage's gathers, in the order in which
        stages begin. It is empty if the step has no gathers to start.
        """
        self._order = list(starts)
        self._starts = list(starts.values())
        self._started = 0

    def begin(self) -> None:
        """Start the gathers of the first two stages of this rank, before the passes."""
        self._start(2)

    def stage_begins(self, stage: int) -> None:
        """Start the gathers of the next stage before the first forward pass of ``stage``.

        If a step restarts, gathers that have started are not repeated.
        """
        if self._starts:
            self._start(self._order.index(stage) + 2)

    def _start(self, count: int) -> None:
        for start in self._starts[self._started : count]:
            start()
        self._started = max(self._started, count)


def parameter_gathers(
    config: Any, chunks: Mapping[int, torch.nn.Module], row: Sequence[Action], forward_only: bool
) -> ParameterGathers:
    """Return the parameter gathers of a step, by stage, for a rank that runs ``row``.

    Callers may remove ``param_sync_func`` from the config and restore it between steps, so each
    step reads it anew.
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
