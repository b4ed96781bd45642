"""Hooks of activation offload: copies of activations to the host, and back before they are used.

When a copy starts and ends is decided by the schedule. The hooks collect the tensors that passes
store, and connect the executor's actions with the copies of this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, override

from megatron.core.utils import log_single_rank

from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.step_hooks import StepHooks
from megatron_ext.adapter.step.training_hooks import CannotRun, TrainingHooks
from megatron_ext.base.logger import logger
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.features.offload.refusals import OFFLOAD_REFUSALS
from megatron_ext.features.offload.runtime.buffers import LESS_MEMORY
from megatron_ext.features.offload.runtime.offload import ActivationOffload
from megatron_ext.runtime.host.host_memory import ShortOfHostMemory
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.owner import Owner
from megatron_ext.schedule.action import Action


class OffloadHooks(TrainingHooks):
    """Hooks for activation offload: host buffers of a training, and their account of memory."""

    _offload: ActivationOffload

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return OFFLOAD_REFUSALS.may_be_on(ours)

    @override
    def connect(self, call: Call, program: Program, connections: Connections) -> None:
        self._offload = ActivationOffload(call.pipeline.rank(), connections.device)

    @override
    def expect(self, program: Program, connections: Connections) -> None:
        """Prepare host buffers for steps of ``program``.

        Collective over the world for the first program that trains.
        """
        if program.problem.forward_only:
            return
        row, costs = program.schedule.rows[self._offload.rank], program.problem.costs
        try:
            host_memory = connections.host_memory.check(row, costs)
        except ShortOfHostMemory as error:
            raise CannotRun(f"{error}: {LESS_MEMORY}") from error
        self._offload.expect(row, costs)
        if host_memory:
            log_single_rank(logger, logging.INFO, host_memory)

    @override
    def begin(self, call: Call, program: Program, connections: Connections) -> StepHooks | None:
        if call.forward_only:
            return None
        return _StepOffload(self._offload, program.schedule.rows[self._offload.rank])


class _StepOffload(StepHooks):
    def __init__(self, offload: ActivationOffload, row: tuple[Action, ...]) -> None:
        self._offload = offload
        self._row = row

    @override
    def owners(self, stages: Mapping[int, ModelStage], boundary: Boundary) -> Sequence[Owner]:
        offloaded = self.context = self._offload.step(self._row)
        return [offloaded]
