"""Condition under which a launch is traced. That needs no patch of its own."""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals

TRACE_REFUSALS = FeatureRefusals(lambda config: config.trace is not None)
