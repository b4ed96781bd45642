"""Value ``profile`` of ``--pipeline-costs``, and the settings that it does not go with.

Passes are timed one by one in consecutive steps, so settings under which passes or steps overlap
are refused.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.base.setting import FeatureSettings, conflicting, flag

_PROFILE = "profile"


def _check(config: Any) -> None:
    if config.costs.profile is None:
        return
    if config.costs.text == f"{_PROFILE}:":
        raise ValueError(
            f"{flag('costs')} {config.costs} names no file: write {_PROFILE}:FILE, or {_PROFILE} "
            f"for {config.costs.profile} in the folder of --save"
        )
    then = "then launch with this flag and the written costs file"
    if config.options.steps_overlap:
        raise conflicting(
            config,
            "post_validation",
            "costs",
            "the passes of steps that overlap cannot be measured one by one; profile without "
            f"{flag('post_validation')}, {then}",
        )
    if config.rank_speeds is not None:
        raise conflicting(
            config,
            "rank_speeds",
            "costs",
            f"measured costs contain the speeds of the ranks already; drop {flag('rank_speeds')}",
        )
    if config.slices > 1:
        raise conflicting(
            config,
            "slices",
            "costs",
            f"only passes of whole microbatches are measured; profile without {flag('slices')}, "
            f"{then}",
        )


PROFILE_SETTINGS = FeatureSettings({}, _check, values=(_PROFILE,))
