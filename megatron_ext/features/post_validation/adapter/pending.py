"""Optimizer steps taken before their post-validation, which are committed or rolled back later.

While post-validation is *armed*, the optimizer steps on the gradient norm and infs of earlier ranks
in the chain alone, and the training loop goes on as after a success. In the next step the norm and
infs of all ranks arrive: the optimizer step is committed, or rolled back and redone as by Megatron.
Actions that depend on this verdict (zeroing gradients, the log) are deferred until then.

There is one `post_validation` per process, as there is one training loop. The patches in
core/optimizer/optimizer, core/optimizer_param_scheduler and the loop in training consult it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron_ext.adapter.training_globals import current_iteration
from megatron_ext.base.logger import logger
from megatron_ext.features.post_validation.adapter.optimizer import SpeculativeOptimizer
from megatron_ext.features.post_validation.adapter.revertible_lr_step import RevertibleLrStep
from megatron_ext.features.post_validation.runtime.arming import History
from megatron_ext.features.post_validation.runtime.messages import ValidationMessages
from megatron_ext.features.post_validation.runtime.partial_state import PartialState

# Result of a step of Megatron's optimizers: success, gradient norm, number of zero gradients.
StepResult = tuple[bool, float | None, int | None]


@dataclass(frozen=True)
class Result:
    """Result of an optimizer step after its post-validation.

    ``grad_norm`` is None if the step was skipped for an inf. ``is_redone``: the speculative step
    was rolled back, and with it loss scale and learning rate.
    """

    success: bool
    grad_norm: float | None
    num_zeros: int | None = None
    is_redone: bool = False

    def is_quiet(self, clip_grad: float) -> bool:
        """Return whether the optimizer step was neither clipped nor skipped."""
        return (
            self.success
            and self.grad_norm is not None
            and math.isfinite(self.grad_norm)
            and not 0 < clip_grad < self.grad_norm
        )


@dataclass
class _Pending:
    """Optimizer step that has been taken and not post-validated yet, with its deferred actions."""

    iteration: int
    optimizer: Any  # Megatron's optimizer of the model
    scheduled: RevertibleLrStep | None = None
    deferred: list[Callable[[Result], None]] = field(default_factory=list)


@dataclass(frozen=True)
class _Connection:
    messages: ValidationMessages
    speculate: Callable[[Any], SpeculativeOptimizer]


class PostValidation:
    """State of the optimizer step that may be pending, and of actions that wait for it."""

    def __init__(self) -> None:
        self._connection: _Connection | None = None
        self._start()

    def _start(self) -> None:
        self._optimizer: SpeculativeOptimizer | None = None
        self._history = History()
        self._latest_norm: float | None = None  # gradient norm of the latest post-validated step
        self._pending: _Pending | None = None
        self._is_delivering = False
        self._has_told = False
        self._tokens = 0
        self._scale: Callable[[int], None] | None = None
        # Iteration whose optimizer step is being taken or rolled back; None at other times.
        self._half_done: int | None = None

    def connect(
        self, messages: ValidationMessages, speculate: Callable[[Any], SpeculativeOptimizer]
    ) -> None:
        """Let steps overlap from now on, whenever few of the latest steps were clipped or skipped.

        All other steps run Megatron's own optimizer step.

        Args:
            messages: validation messages between the ranks of this pipeline.
            speculate: makes a `SpeculativeOptimizer` from Megatron's optimizer.
        """
        self._connection = _Connection(messages, speculate)
        self._start()

    def disconnect(self) -> None:
        """Discard any pending optimizer step, because the training has ended."""
        self._connection = None
        self._start()

    @property
    def messages(self) -> ValidationMessages:
        """Messages of post-validation between the ranks of this pipeline, once they are
        connected."""
        assert self._connection is not None
        return self._connection.messages

    @property
    def is_pending(self) -> bool:
        """Whether an optimizer step has been taken and is not yet committed or rolled back."""
        return self._pending is not None

    @property
    def pending_optimizer(self) -> Any:
        """Megatron's optimizer whose step is pending, or None."""
        return None if self._pending is None else self._pending.optimizer

    @property
    def answers_at_once(self) -> bool:
        """Whether reductions of the training loop skip communication.

        The reductions then return this rank's own value.
        """
        return self.is_pending or self._is_delivering

    @property
    def is_armed(self) -> bool:
        """Whether the next optimizer step is taken before its post-validation.

        That is so if few of the latest steps were clipped or skipped.
        """
        return self._history.is_armed

    def scale_by_tokens(self, tokens: int, scale: Callable[[int], None]) -> None:
        """Scale the gradients of the next step by a number of tokens, before they are prepared.

        The number counts the tokens of the ranks up to this one in the chain; this rank counts
        ``tokens``. (The rank of the last stage counts all tokens of the pipeline. It is the first
        rank of the chain, because other placements are refused if gradients are scaled by tokens.)
        """
        self._tokens, self._scale = tokens, scale

    def optimizer_step(self, stock: Callable[[Any], StepResult], optimizer: Any) -> StepResult:
        """Take an optimizer step in place of ``stock``, Megatron's top-level step.

        If the step is pending afterwards, the result is that of a success, with the latest known
        norm.
        """
        iteration = current_iteration()
        # A step may only stay pending in Megatron's own training loop, which commits it later.
        if self._connection is None or iteration is None:
            return stock(optimizer)
        if not self.is_armed:
            result = Result(*stock(optimizer))
            self._remember(result, iteration, optimizer)
            return result.success, result.grad_norm, result.num_zeros
        assert self._pending is None, f"the step of {self._pending} was not settled"
        messages = self._connection.messages
        if self._optimizer is None:
            self._optimizer = self._connection.speculate(optimizer)
        self._half_done = iteration
        # This rank's part of the norm is prepared while the message of the previous rank may be in
        # flight.
        if self._scale is None:
            partial = self._optimizer.prepare()
            before = messages.partial()
        else:
            before = messages.partial()
            self._scale(before.tokens + self._tokens)
            partial = replace(self._optimizer.prepare(), tokens=self._tokens)
        state = before.plus(partial)
        messages.pass_on(state)
        if self._optimizer.is_quiet(state):
            self._optimizer.step(keep=not messages.is_last)
            self._tell_what_is_kept(messages)
        self._pending = _Pending(iteration, optimizer)
        self._half_done = None
        self._tokens, self._scale = 0, None
        return True, self._latest_norm, None

    def _tell_what_is_kept(self, messages: ValidationMessages) -> None:
        """Log once where the state before an optimizer step is stored.

        One rank with such a copy logs: the first on a linear placement, the last under a V
        schedule.
        """
        ends = (0, dist.get_world_size() - 1)
        if not self._has_told and messages.is_first and dist.get_rank() in ends:
            assert self._optimizer is not None
            logger.info(
                f"before a step this rank keeps {self._optimizer.snapshot}, so that the step can "
                f"be taken back"
            )
            self._has_told = True

    def schedule_step(self, step: RevertibleLrStep) -> None:
        """Advance the learning rate by ``step``, as after a successful optimizer step."""
        assert self._pending is not None
        self._pending.scheduled = step
        step.take()

    def defer(self, action: Callable[[], None]) -> None:
        """Defer ``action`` until the pending step is committed or rolled back.

        Deferred actions and logs run in the order of their calls.
        """
        self.log(lambda result: action())

    def log(self, deliver: Callable[[Result], None]) -> None:
        """Defer ``deliver`` until the pending step is post-validated, and call it with the
        result."""
        assert self._pending is not None
        self._pending.deferred.append(deliver)

    def commit_or_rollback(self) -> None:
        """Wait until the pending optimizer step is post-validated, if there is one.

        Collective over the pipelines in that case.

        Raises:
            RuntimeError: a step has failed halfway, and this rank's state must not be saved.
        """
        if self._half_done is not None:
            raise RuntimeError(
                f"the optimizer's step of iteration {self._half_done} has failed halfway: this "
                "rank's parameters are neither those before nor those after the step, and cannot "
                "be saved"
            )
        if self._pending is not None:
            assert self._connection is not None
            self.verdict(self._connection.messages.verdict())

    def verdict(self, total: PartialState) -> bool:
        """Commit the pending optimizer step, or roll it back and redo it.

        Then run the deferred actions. ``total`` is the validation state of all ranks.

        Returns:
            Whether the step was committed. If not, results computed since the step are invalid.
        """
        pending = self._pending
        assert pending is not None and self._optimizer is not None
        is_kept = self._optimizer.is_quiet(total)
        if is_kept:
            result = Result(True, math.sqrt(total.squared_norm))
        else:
            self._half_done = pending.iteration
            result = self._redo(self._optimizer, pending, total)
            self._half_done = None
        self._pending = None
        self._remember(result, pending.iteration, pending.optimizer)
        self._is_delivering = True
        try:
            for action in pending.deferred:
                action(result)
        finally:
            self._is_delivering = False
        return is_kept

    def _redo(
        self, optimizer: SpeculativeOptimizer, pending: _Pending, total: PartialState
    ) -> Result:
        if pending.scheduled is not None:
            # The step is repeated with its own iteration's learning rate.
            pending.scheduled.take_back()
        result = Result(*optimizer.redo(total.found_inf))
        if result.success and pending.scheduled is not None:
            pending.scheduled.take()
        return replace(result, is_redone=True)

    def _remember(self, result: Result, iteration: int, optimizer: Any) -> None:
        """Record a post-validated step, which may switch overlapping on or off for the next
        step."""
        was_armed = self._history.is_armed
        self._latest_norm = result.grad_norm
        self._history = self._history.then(result.is_quiet(optimizer.config.clip_grad))
        if self._history.is_armed != was_armed:
            log_single_rank(logger, logging.INFO, _change(self._history, iteration))


def _change(history: History, iteration: int) -> str:
    bad = f"{history.bad} of the last {len(history.quiet)} steps were clipped or skipped"
    if history.is_armed:
        return (
            f"steps are post-validated from iteration {iteration + 1} on: {bad}; what they come to "
            f"is logged one step late"
        )
    return f"steps are validated as Megatron does it from iteration {iteration + 1} on: {bad}"


post_validation = PostValidation()
