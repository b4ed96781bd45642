"""Settings of a race of schedules."""

from __future__ import annotations

from typing import Any

from megatron_ext.base.setting import FeatureSettings, conflicting, enumerated, flag, setting
from megatron_ext.compile.contestants import Contestants, RaceThen


def _schedules(name: str, text: str) -> Contestants:
    return Contestants(tuple(text.split()))


def _check(config: Any) -> None:
    if config.race is None:
        if config.race_then is not RaceThen.WINNER:
            raise ValueError(
                f"{flag('race_then')} {config.race_then} is given without {flag('race')}: there "
                f"is no race to end; add {flag('race')}, or drop {flag('race_then')}"
            )
    elif config.post_validation:
        raise conflicting(
            config,
            "race",
            "post_validation",
            f"steps that overlap cannot be timed one by one; race without "
            f"{flag('post_validation')}",
        )
    elif config.slices > 1:
        raise conflicting(
            config, "race", "slices", f"races of slices are untried; race without {flag('slices')}"
        )


RACE_SETTINGS = FeatureSettings(
    {
        "race": setting(
            _schedules,
            "SPECS",
            help="Schedules to time against a baseline, and against each other, in turns of a few "
            "iterations of this training, whose numbers do not change. Write names separated by "
            'spaces, as "zb-h1 zb-1p". All have to place stages on the same ranks. Their placement '
            "decides the baseline: 1f1b for a line, interleaved for a loop, 1f1b-v for a V, hanayo "
            "for a wave. --pipeline-schedule is not needed; if given, its schedule races too.",
        ),
        "race_then": enumerated(
            RaceThen,
            help="Schedule under which the training goes on after a race: the fastest one with "
            "winner (the default), the baseline with report.",
        ),
    },
    _check,
)
