"""Passes that take the time they cost and compute next to nothing: schedules on emulated clocks.

What is measured then is the executor, the transport and autograd, and not the machine's arithmetic:
a rank that sleeps needs no core, so a pipeline of eight runs on two.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.compile.program.verify import Program
from megatron_ext.features.post_validation.runtime.actions import Validation
from megatron_ext.features.post_validation.runtime.messages import ValidationMessages
from megatron_ext.features.post_validation.runtime.partial_state import PartialState
from megatron_ext.features.vocabulary.runtime.shard import VocabularyShard
from megatron_ext.features.vocabulary.runtime.vocabulary_passes import VocabularyPasses
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.owner import Handler
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, OverlapCosts
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import is_compute

SHAPE = (1, 1, 8)  # shape of the tensors between stages
DTYPE = torch.float32


def in_seconds(costs: str, placement: Placement) -> Costs:
    """Return the costs in the text ``costs``, which are milliseconds, converted to seconds.

    Messages cost nothing in them: real messages are sent here, and take their own time.
    """
    given = parse_costs(costs, placement)
    host, vocabulary = given.host, given.vocabulary
    if host is not None:
        host = replace(host, seconds=_in_seconds(host.seconds))
    if vocabulary is not None:
        vocabulary = replace(
            vocabulary,
            output_layer=_in_seconds(vocabulary.output_layer),
            embedding=_in_seconds(vocabulary.embedding),
            fixed_output_layer=_in_seconds(vocabulary.fixed_output_layer),
            fixed_embedding=_in_seconds(vocabulary.fixed_embedding),
        )
    passes, slices = given.passes, given.slices
    return replace(
        given,
        passes=replace(
            passes,
            seconds=_in_seconds(passes.seconds),
            recompute=_in_seconds(passes.recompute),
            fused_backward_saving=_in_seconds(passes.fused_backward_saving),
        ),
        links=LinkCosts(),
        slices=replace(slices, fixed=_in_seconds(slices.fixed)),
        host=host,
        vocabulary=vocabulary,
        overlap=OverlapCosts(_in_seconds(given.overlap.savings)),
    )


def _in_seconds(ms: Any) -> Any:
    """Return milliseconds in seconds: a number, or tuples and mappings of numbers."""
    if isinstance(ms, Mapping):
        return {key: _in_seconds(figures) for key, figures in ms.items()}
    return tuple(map(_in_seconds, ms)) if isinstance(ms, tuple) else ms / 1000


WAKES_LATE = 0.0003  # about the seconds by which a system wakes a sleeping process late


def take(seconds: float) -> None:
    """Let an emulated pass last ``seconds``.

    It sleeps for most of them, and is busy for the last moment, so that it ends on time.
    """
    if not _clock.runs:
        return
    end = time.monotonic() + seconds + _clock.seconds_after_wait()
    if seconds > WAKES_LATE:
        time.sleep(seconds - WAKES_LATE)
    while time.monotonic() < end:
        pass
    _clock.ended = time.monotonic()


WAIT = 0.002  # least seconds between two passes that count as waiting


@dataclass
class _Clock:
    """Emulated clock of a rank.

    Attributes:
        runs: whether passes last as long as they cost; if not, they take no time.
        slower_after_wait: seconds by which a pass is longer after a wait, as on a device whose
            caches have cooled and whose clock has slowed down.
        ended: when the last pass ended.
    """

    runs: bool = True
    slower_after_wait: float = 0.0
    ended: float = 0.0

    def seconds_after_wait(self) -> float:
        """Return by how many seconds the pass that begins now is longer because of a wait."""
        return self.slower_after_wait if time.monotonic() - self.ended > WAIT else 0.0


def slow_after_waits(seconds: float) -> None:
    """Let passes of this rank take ``seconds`` longer after the rank has waited."""
    _clock.slower_after_wait = seconds


_clock = _Clock()


@contextlib.contextmanager
def as_one(seconds: float) -> Iterator[None]:
    """Run the passes in this context so that they take ``seconds`` together."""
    _clock.runs = False
    try:
        yield
    finally:
        _clock.runs = True
    take(seconds)


class _Activations(torch.autograd.Function):
    """Function whose forward takes as long as an F pass, and its backward as long as an I pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        take(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        take(ctx.backward_seconds)
        return dy.clone(), None, None


class _Weight(torch.autograd.Function):
    """Function whose backward takes as long as a W pass: at once, or later if W is split off."""

    @staticmethod
    def forward(ctx: Any, weight: torch.nn.Parameter, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        return weight.detach() * 1.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        gradient = dy.sum().reshape(1)

        def compute() -> Tensor:
            take(ctx.seconds)
            return gradient

        if queue.splitting:
            queue.put(ctx.weight, compute, [gradient])
            return None, None
        return compute(), None


_PASSES = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class EmulatedChunk(torch.nn.Module):
    """A chunk of a model whose passes sleep as long as they cost."""

    def __init__(self, stage: int, costs: Costs) -> None:
        super().__init__()
        self.costs = costs
        self.seconds = {kind: costs.of(Action(stage, kind, 0)) for kind in _PASSES}
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, kind: Kind = Kind.FORWARD) -> Tensor:
        """Run the chunk for an F pass; for an R pass, which recomputes, if ``kind`` says so."""
        seconds = self.seconds
        y: Tensor = _Activations.apply(x, seconds[kind], seconds[Kind.BACKWARD_INPUT])
        return y + _Weight.apply(self.weight, seconds[Kind.BACKWARD_WEIGHT])


@dataclass(frozen=True)
class Contender:
    """One way to run a step on this rank: an executor with a schedule.

    Attributes:
        name: name of the executor and the schedule, such as ``megatron-ext zb-v`` or ``megatron
            1f1b``.
        ideal: seconds that the schedule takes with free messages and no overhead.
        passes: number of passes of this rank in a step.
        step: runs one step.
        commit_or_rollback: waits until the ranks have agreed whether the last step counts; None
            without post-validation.
    """

    name: str
    ideal: float
    passes: int
    step: Callable[[], None]
    commit_or_rollback: Callable[[], None] | None = None


def data() -> Tensor:
    """Return the input of the first stage.

    It requires a gradient, as autograd would skip I without one.
    """
    return torch.ones(SHAPE, dtype=DTYPE, requires_grad=True)


# ---- Vocabulary parallelism: emulated passes that take what they cost, and real collectives

# Batch size and sequence length of the tokens: as many as `SHAPE` has hidden states.
_TOKENS = (1, 1)


class _Ends:
    """`VocabularyEnds` of a model without data: all tokens and labels are 0, the loss is a mean."""

    def tokens(self, microbatch: int) -> Tensor:
        return torch.zeros(_TOKENS, dtype=torch.int64)

    def labels(self, microbatch: int) -> Tensor:
        return torch.zeros(_TOKENS, dtype=torch.int64)

    def loss(self, microbatch: int, losses: Tensor) -> Tensor:
        return torch.full_like(losses, 1 / losses.numel())


class EmulatedVocabulary:
    """A rank's shard of an embedding and an output layer that have one row for each rank.

    The shard stays the same over all steps.
    """

    def __init__(self, program: Program, pipeline: dist.ProcessGroup, recorder: Recorder) -> None:
        self._program = program
        self._costs = program.problem.costs
        self._recorder = recorder
        self._collectives = Collectives(pipeline, torch.device("cpu"))
        embedding, output = (torch.nn.Linear(SHAPE[2], 1, False, dtype=DTYPE) for _ in range(2))
        self._shard = VocabularyShard(embedding, output, pipeline.rank(), None, False)

    def step(self) -> VocabularyPasses:
        """Return the passes of the vocabulary in a new step, for the executor."""
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


# ---- Post-validation: real messages of an optimizer that takes no time


def synchronise() -> None:
    """Let all ranks wait for the last one, as the all-reduce of an optimizer does."""
    dist.all_reduce(torch.zeros(1))


class EmulatedValidation(Validation):
    """`Validation` of the last step, which always succeeds, and an optimizer that takes no time."""

    def __init__(
        self, pipeline: dist.ProcessGroup, placement: Placement, recorder: Recorder
    ) -> None:
        """Create the messages of the validation. All ranks have to do so together."""
        self._messages = ValidationMessages(pipeline, placement, recorder)

    def optimizer_step(self) -> None:
        """Run RECV_P, STEP and SEND_P: receive the earlier ranks' state, step, and send it on."""
        self._messages.pass_on(self._messages.partial().plus(PartialState(found_inf=False)))

    def expect(self) -> None:
        self._messages.expect()

    def commit_or_rollback(self) -> bool:
        return not (self._messages.is_pending and self._messages.verdict().found_inf)

    def abandon(self) -> None:
        self._messages.abandon()
