"""Condition under which microbatches are ordered or dealt in a launch, also under Megatron's own
schedule."""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals

ARRANGEMENT_REFUSALS = FeatureRefusals(
    may_be_on=lambda config: config.arranges_microbatches,
    name="microbatches ordered and dealt by their cost",
    patches=("megatron.training.datasets.data_samplers", "megatron.bridge.data.loaders"),
)
