"""Hooks of slices of sequences.

Megatron's model, its loss and its messages take whole microbatches. In a step with slices the
stages run them slice by slice, messages have the length of a slice, and models that could not be
cut are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, override

from megatron_ext.adapter.slices.context_parallel import connect_sharing
from megatron_ext.adapter.slices.known_models import refuse_unknown
from megatron_ext.adapter.slices.lengths import lengths_passed_on, spans_of
from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step.call import Call, refuse_varying_shapes
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.sliced_stage import SlicedStage
from megatron_ext.adapter.step.step_hooks import StageClass, StepHooks
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.runtime.messages.connecting import connecting
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.slices.running_slice import Span, running_slice


class SlicesHooks(TrainingHooks):
    """Hooks for slices of sequences, whose stages run a microbatch slice by slice."""

    needs_callers_hooks = True

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return ours.slices > 1

    @override
    @classmethod
    def check_program(cls, args: Any, program: Program) -> None:
        spans_of(program, args, args.seq_length)

    @override
    def check_call(self, call: Call) -> None:
        refuse_varying_shapes(call, "slices")

    @override
    def check_models(self, call: Call) -> None:
        refuse_unknown(call.models)

    @override
    def connect(self, call: Call, program: Program, connections: Connections) -> None:
        if (sharing := call.groups.cp).size() > 1:
            with connecting(connections.recorder, sharing, "of context parallelism"):
                connect_sharing(sharing)

    @override
    def begin(self, call: Call, program: Program, connections: Connections) -> StepHooks | None:
        tokens = call.decoder_seq_length or call.seq_length
        spans = spans_of(program, call.config, tokens, call.groups.cp.rank())
        joins_weights = program.problem.slices.joined_weights
        return _SlicedStep(call, spans, joins_weights) if spans else None


class _SlicedStep(StepHooks):
    def __init__(self, call: Call, spans: Sequence[Span], joins_weights: bool) -> None:
        self._call = call
        self._spans = spans
        self._joins_weights = joins_weights

    @override
    def split(self, split: Split) -> Split:
        self._hooked = split.hooks.parameters
        return split

    @override
    def boundary(self, boundary: Boundary) -> Boundary:
        return replace(boundary, lengths=lengths_passed_on(boundary, self._spans))

    @override
    def stage_class(self, number: int) -> StageClass:
        return partial(
            SlicedStage,
            spans=self._spans,
            hooked=self._hooked,
            joins_weights=self._joins_weights,
        )

    @override
    def around(self) -> contextlib.AbstractContextManager[None]:
        return running_slice.step(self._spans, self._call.groups.cp)
