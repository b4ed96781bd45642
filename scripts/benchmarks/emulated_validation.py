"""Post-validation on emulated clocks: real messages, of an optimizer that takes no time."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ext.runtime.post_validation.actions import Validation
from megatron_ext.runtime.post_validation.messages import ValidationMessages
from megatron_ext.runtime.post_validation.partial_state import PartialState
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.placement import Placement


def synchronise() -> None:
    """Make all ranks of the world wait for the last one, as an optimizer's all-reduce does."""
    dist.all_reduce(torch.zeros(1))


class EmulatedValidation(Validation):
    """`Validation` of the last step, and the optimizer. Every ``bad_every``-th verdict is bad, from
    that on the first step on; 0: none is."""

    def __init__(
        self, pipeline: dist.ProcessGroup, placement: Placement, recorder: Recorder, bad_every: int
    ) -> None:
        """Collective over the world."""
        self._messages = ValidationMessages(pipeline, placement, recorder)
        self._bad_every = bad_every
        self._steps = 0

    def optimizer_step(self) -> None:
        """RECV_P, STEP, SEND_P."""
        is_bad = is_bad_step(self._steps, self._bad_every)
        own = PartialState(found_inf=is_bad and self._messages.is_last)
        self._messages.pass_on(self._messages.partial().plus(own))
        self._steps += 1

    def expect(self) -> None:
        self._messages.expect()

    def commit_or_rollback(self) -> bool:
        if not self._messages.is_pending:
            return True
        stands = not self._messages.verdict().found_inf
        if not stands:
            synchronise()  # the step is repeated, with all that stock does
        return stands

    def abandon(self) -> None:
        self._messages.abandon()


def is_bad_step(step: int, bad_every: int) -> bool:
    """Whether the verdict on ``step``, from 0, is bad."""
    return bad_every > 0 and step % bad_every == 0
