"""Hooks of microbatches that are ordered and dealt by their cost, before they are read."""

from __future__ import annotations

from typing import Any, override

from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.config import PipelineConfig
from megatron_ext.features.arrangement.adapter.order_refusals import check_arrangement
from megatron_ext.features.arrangement.adapter.sample_weights import weights_in
from megatron_ext.features.arrangement.refusals import ARRANGEMENT_REFUSALS


class ArrangementHooks(TrainingHooks):
    """Hooks that check launches whose microbatches are ordered by cost.

    Steps need no hooks for that: the data loader already yields the microbatches in the new order.
    """

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return ARRANGEMENT_REFUSALS.may_be_on(ours)

    @override
    @classmethod
    def check_microbatches(cls, args: Any, ours: PipelineConfig) -> None:
        check_arrangement(args, ours)

    @override
    @classmethod
    def check_files(cls, ours: PipelineConfig) -> None:
        if ours.microbatch_weights is not None:
            weights_in(ours.microbatch_weights)
