"""Costs that a training measures: a value of the setting of costs, and what it does not go with."""

from __future__ import annotations

from typing import Any

from megatron_ext.base.setting import FeatureSettings, conflicting, flag


def _check(config: Any) -> None:
    if config.costs.profile is None:
        return
    then = "then launch with it and the written costs file"
    if config.post_validation:
        raise conflicting(
            config,
            "post_validation",
            "costs",
            f"steps that overlap cannot be measured one by one; profile without "
            f"{flag('post_validation')}, {then}",
        )
    if config.rank_speeds is not None:
        raise conflicting(
            config,
            "rank_speeds",
            "costs",
            f"measured costs contain the speeds of the ranks; drop {flag('rank_speeds')}",
        )
    if config.slices > 1:
        raise conflicting(
            config,
            "slices",
            "costs",
            f"only whole microbatches are measured; profile without {flag('slices')}, {then}",
        )


PROFILE_SETTINGS = FeatureSettings({}, _check, values=("profile",))
