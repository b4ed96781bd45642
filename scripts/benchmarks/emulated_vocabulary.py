"""Vocabulary parallelism on emulated clocks: passes that take what they cost, real collectives."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.program.verify import Program
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.owner import Handler
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.vocabulary.passes import VocabularyPasses
from megatron_ext.runtime.vocabulary.shard import VocabularyShard
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.schedule import is_compute
from scripts.benchmarks.emulated import DTYPE, SHAPE, take

_TOKENS = (1, 1)  # batch, sequence: as many as `SHAPE` has hidden states


class _Ends:
    """`VocabularyEnds` of a model without data: every token is 0, and the loss is the mean."""

    def tokens(self, microbatch: int) -> Tensor:
        return torch.zeros(_TOKENS, dtype=torch.int64)

    def labels(self, microbatch: int) -> Tensor:
        return torch.zeros(_TOKENS, dtype=torch.int64)

    def loss(self, microbatch: int, losses: Tensor) -> Tensor:
        return torch.full_like(losses, 1 / losses.numel())


class EmulatedVocabulary:
    """A rank's part of tables with one row a rank, over all steps."""

    def __init__(self, program: Program, pipeline: dist.ProcessGroup, recorder: Recorder) -> None:
        self._program = program
        self._costs = program.problem.costs
        self._recorder = recorder
        self._collectives = Collectives(pipeline, torch.device("cpu"))
        embedding, output = (
            torch.nn.Parameter(torch.ones(1, SHAPE[2], dtype=DTYPE)) for _ in range(2)
        )
        self._shard = VocabularyShard(embedding, output, pipeline.rank(), None, False)

    def step(self) -> VocabularyPasses:
        """Return the vocabulary's passes of a new step, for the executor."""
        return _EmulatedPasses(
            self._costs,
            self._program,
            _Ends(),
            self._shard,
            self._collectives,
            Boundary(SHAPE, DTYPE),
            _TOKENS,
            self._recorder,
        )


class _EmulatedPasses(VocabularyPasses):
    def __init__(self, costs: Costs, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._costs = costs

    def handlers(self) -> Mapping[Kind, Handler]:
        return {kind: partial(self._timed, handler) for kind, handler in super().handlers().items()}

    def _timed(self, handler: Handler, action: Action) -> None:
        handler(action)
        if is_compute(action):
            take(self._costs.of(action))
