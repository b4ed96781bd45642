"""Condition under which a launch measures costs. The measurement needs no patch of its own."""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals

PROFILE_REFUSALS = FeatureRefusals(lambda config: config.costs.profile is not None)
