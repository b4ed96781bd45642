"""Settings of a race of schedules.

The user names the schedules that race, and says under which one the training goes on. All must
place stages on the same ranks, since a model's layers stay where they are; the placement decides
the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.base.setting import (
    NAMES_SCHEDULES,
    FeatureSettings,
    conflicting,
    enumerated,
    flag,
    setting,
)
from megatron_ext.base.words import counted
from megatron_ext.compile.contestants import Contestants, RaceThen, family_name
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.placement import Placement

# Plain schedules, one for each placement. The baseline of a race is the first with the placement of
# the raced schedules.
_BASELINES = ("1f1b", "interleaved", "interleaved:vpp={chunks}", "1f1b-v", "hanayo:waves={waves}")


def _schedules(name: str, text: str) -> Contestants:
    return Contestants(tuple(text.split()))


def _check(config: Any) -> None:
    if config.race is None:
        if config.race_then is not RaceThen.WINNER:
            raise ValueError(
                f"{flag('race_then')} {config.race_then} chooses the schedule after a race, and "
                f"no race is requested; add {flag('race')}, or drop {flag('race_then')}"
            )
    elif config.options.steps_overlap:
        raise conflicting(
            config,
            "race",
            "post_validation",
            "steps that overlap cannot be timed one by one; race schedules without "
            f"{flag('post_validation')}",
        )
    elif config.slices > 1:
        raise conflicting(
            config,
            "race",
            "slices",
            f"races with slices of sequences are untested; race without {flag('slices')}",
        )


def _completed(parsed: Mapping[str, Any]) -> dict[str, Any]:
    if "race" not in parsed:
        return {}
    race = contestants(parsed.get("schedule"), parsed["race"].specs)
    return {"schedule": race.baseline, "race": race}


def contestants(schedule: str | None, wanted: Sequence[str]) -> Contestants:
    """Return the schedules of a race: ``wanted``, and ``schedule`` if one is given.

    The baseline comes first. It is a plain schedule with their placement; if a schedule of the same
    family (generator) is among them, that one is the baseline.

    Raises:
        ValueError: a schedule does not exist or is named twice, there is none to race with, or
            their placements differ or are one on which we have no plain schedule.
    """
    specs = list(dict.fromkeys([*([schedule] if schedule is not None else []), *wanted]))
    if not wanted:
        raise ValueError(
            "--pipeline-race names no schedule: write the names of one or more schedules, as "
            '"zb-h1 zb-1p"'
        )
    for spec in wanted:
        if wanted.count(spec) > 1:
            raise ValueError(
                f"--pipeline-race {' '.join(wanted)}: {spec} is named twice; write it once"
            )
    choices = {spec: choose(spec) for spec in specs}
    ranks = next((resolved.ranks for resolved in choices.values() if resolved.ranks is not None), 2)
    placements = {spec: resolved.place(ranks) for spec, resolved in choices.items()}
    first = placements[specs[0]]
    for spec, placement in placements.items():
        if placement.rank_of != first.rank_of:
            raise ValueError(
                f"--pipeline-race: {specs[0]} has {_words(first)} and {spec} has "
                f"{_words(placement)}, and layers do not change ranks while a model trains: race "
                "schedules that put each stage on the same rank"
            )
    baseline = _baseline(first, specs)
    candidates = [spec for spec in specs if spec != baseline]
    if not candidates:
        raise ValueError(
            f"--pipeline-race {baseline}: {baseline} is the schedule to compare others with, and "
            "no other is named; name another schedule"
        )
    return Contestants((baseline, *candidates))


def _baseline(placement: Placement, specs: Sequence[str]) -> str:
    chunks = placement.chunks
    for text in _BASELINES:
        spec = text.format(chunks=chunks, waves=chunks // 2)
        if chunks % 2 and "waves" in spec:
            continue
        if choose(spec).place(placement.ranks).rank_of == placement.rank_of:
            of_family = [given for given in specs if family_name(given) == family_name(spec)]
            return of_family[0] if of_family else spec
    raise ValueError(
        f"--pipeline-race: {specs[0]} has stages on ranks {list(placement.rank_of)}, and there is "
        "no plain schedule with this placement to compare with: race schedules with a linear, "
        "interleaved (loop), V or wave placement"
    )


def _words(placement: Placement) -> str:
    return f"the placement {placement.name} with {counted(placement.chunks, 'stage')} on a rank"


RACE_SETTINGS = FeatureSettings(
    {
        "race": setting(
            _schedules,
            "SPECS",
            help=(
                "Schedules to time against a plain schedule (the baseline) and against each "
                "other, in turns of a few iterations of this training, whose numbers do not "
                'change. Write names separated by spaces, as "zb-h1 zb-1p". All have to place '
                "stages on the same ranks. Their placement decides the baseline: 1f1b for a "
                "line, interleaved for a loop, 1f1b-v for a V, hanayo for a wave. "
                "--pipeline-schedule is not needed; if given, its schedule races too."
            ),
        )
        | NAMES_SCHEDULES,
        "race_then": enumerated(
            RaceThen,
            help="Schedule under which the training goes on after a race: the fastest one with "
            "winner (the default), the baseline with report.",
        ),
    },
    _check,
    _completed,
)
