"""Hooks of vocabulary parallelism.

Each rank has rows of the embedding and of the output layer, and their passes are part of the
schedule. The stages at the ends of the model therefore give and take hidden states, and collectives
connect all ranks before the first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, override

from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step.call import Call, refuse_varying_shapes
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.adapter.step.step_hooks import StageClass, StepHooks
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.features.vocabulary.adapter.end_stage import EndStage, ends_of
from megatron_ext.features.vocabulary.adapter.padding import pad_vocabulary
from megatron_ext.features.vocabulary.adapter.vocabulary_rows import await_tables, shard_of
from megatron_ext.features.vocabulary.refusals import VOCABULARY_REFUSALS
from megatron_ext.features.vocabulary.runtime.vocabulary_passes import VocabularyPasses
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.runtime.messages.peers import peers
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.owner import Owner


class VocabularyHooks(TrainingHooks):
    """Hooks for vocabulary parallelism, with the collectives of a training.

    All ranks share embedding and output layer.
    """

    trains_first_stage = True
    _collectives: Collectives

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return VOCABULARY_REFUSALS.may_be_on(ours)

    @override
    @classmethod
    def complete_arguments(cls, args: Any, ours: PipelineConfig) -> str | None:
        return pad_vocabulary(args)

    @override
    def check_call(self, call: Call) -> None:
        if call.collect_non_loss_data:
            raise ValueError(
                "collect_non_loss_data does not go with --pipeline-vocab-parallel "
                f"{self._config.vocab_parallel}: each rank has a part of the logits only; drop "
                "--pipeline-vocab-parallel"
            )
        refuse_varying_shapes(call, "vocab-parallel")

    @override
    def connect(self, call: Call, program: Program, connections: Connections) -> None:
        self._collectives = peers().collectives(
            call.pipeline, connections.device, connections.ctas, connections.recorder
        )

    @override
    def begin(self, call: Call, program: Program, connections: Connections) -> StepHooks:
        return _VocabularyStep(call, program, connections, self._collectives)


class _VocabularyStep(StepHooks):
    def __init__(
        self, call: Call, program: Program, connections: Connections, collectives: Collectives
    ) -> None:
        self._call = call
        self._program = program
        self._recorder = connections.recorder
        self._collectives = collectives
        self._shard = shard_of(call.models, call.config, call.pipeline, call.groups.tp)

    @override
    def split(self, split: Split) -> Split:
        output = frozenset([self._shard.output])
        return replace(split, at_once=frozenset(), separate_weights=output)

    @override
    def stage_class(self, number: int) -> StageClass | None:
        placement = self._program.schedule.placement
        is_end = placement.is_first(number) or placement.is_last(number)
        return EndStage if is_end else None

    @override
    def owners(self, stages: Mapping[int, ModelStage], boundary: Boundary) -> Sequence[Owner]:
        self.ends = VocabularyPasses(
            self._program,
            ends_of(stages.values()),
            self._shard,
            self._collectives,
            boundary,
            self._call.tokens_shape,
            self._recorder,
        )
        return [self.ends]

    @override
    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        await_tables(self._call.models)
        yield
