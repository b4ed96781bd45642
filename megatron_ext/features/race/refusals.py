"""Condition under which schedules race in a launch, and the patch that a race needs.

Without the patch, saves between iterations would count as time of a schedule.
"""

from __future__ import annotations

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals

RACE_REFUSALS = FeatureRefusals(
    may_be_on=lambda config: config.race is not None,
    name="a race",
    patches=("megatron.training.training.timed_saving",),
)
