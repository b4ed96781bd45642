"""Launches that log metrics."""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals

METRICS_REFUSALS = FeatureRefusals(lambda config: config.metrics)
