"""Condition under which a launch logs metrics. Metrics need no patch of their own."""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals

METRICS_REFUSALS = FeatureRefusals(lambda config: config.metrics)
