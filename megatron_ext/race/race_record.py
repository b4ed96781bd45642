"""Measurements of a race, as a file: the next start of the same training goes on with them.

A job may end in the middle of a race. What it has measured is written to a file that the next start
reads, checks against its own race, and goes on from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_ext.base.text_file import (
    LARGEST_JSON,
    how_to_rename,
    parse_json,
    read_text_file,
    write_text_file,
)
from megatron_ext.base.words import shown
from megatron_ext.compile.contestants import Contestants
from megatron_ext.race.rounds import TURNS, Race, Round

NAME = "race.json"  # name of the file in the checkpoints' folder
_VERSION = 2
THE_RACE = "the race"  # name of the entry in the fingerprint that holds the raced schedules
_SECONDS = (1e-9, 1e6)  # least and largest seconds of an iteration in a record
_RANGES = {  # least and largest values of the numbers in a record
    "bubble": (-1.0, 1.0),
    "predicted_bubble": (-1.0, 1.0),
    "peak": (0.0, 1e18),
    "predicted_peak": (0.0, 1e18),
    "peak_microbatches": (0.0, 1e9),
}
_MAY_BE_UNKNOWN = ("predicted_bubble", "peak", "predicted_peak")
_KINDS: dict[type, str] = {dict: "table", list: "list", str: "text"}


@dataclass(frozen=True)
class RaceFigures:
    """Measured bubble and peak memory of a schedule, and the predicted ones.

    Attributes:
        bubble, predicted_bubble: idle share of the makespan, over the ranks of a pipeline; the
            predicted one is None if there is no estimate.
        peak, predicted_peak: bytes that activations take on the rank with the most; None where
            that is unknown.
        peak_microbatches: the largest predicted peak of a rank, in microbatches.
    """

    bubble: float
    predicted_bubble: float | None
    peak: float | None
    predicted_peak: float | None
    peak_microbatches: float


@dataclass(frozen=True)
class RaceRecord:
    """Measurements of a race with which the next start goes on.

    Attributes:
        fingerprint: facts about the training, its machine and the race. Measurements count only if
            all of them are the same.
        rounds: measurements of the complete rounds.
        figures: bubbles and peaks of each schedule, by its name.
        winner: the best schedule, or the baseline if none is faster; None while the race goes on.
    """

    fingerprint: Mapping[str, str]
    rounds: list[Round] = field(default_factory=list)
    figures: Mapping[str, RaceFigures] = field(default_factory=dict)
    winner: str | None = None


def save_race_record(record: RaceRecord, path: Path) -> None:
    """Write ``record`` of a race to ``path``, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_file(path, json.dumps({"version": _VERSION, **asdict(record)}, indent=2) + "\n")


def load_race_record(path: Path, contestants: Contestants | None = None) -> RaceRecord:
    """Return the record of a race at ``path``, for a race of ``contestants`` if they are given.

    Raises:
        ValueError: the file cannot be read, is no record, is of another version, or is none that a
            race of these contestants can have written.
    """
    text = read_text_file(path, "race file", LARGEST_JSON)
    try:
        data = _of_kind(parse_json(text), dict, "the file")
        if (version := data.pop("version", None)) != _VERSION:
            advice = how_to_rename(version, _VERSION) + "remove it"
            raise ValueError(
                f"the version of the race record is {shown(version)}, and only {_VERSION} is "
                f"known: {advice}"
            )
        if data.keys() != (names := {name.name for name in fields(RaceRecord)}):
            raise ValueError(
                f"the race record must have exactly the entries {', '.join(sorted(names))}"
            )
        record = RaceRecord(
            {
                name: _of_kind(fact, str, f"fingerprint, {name}")
                for name, fact in _of_kind(data["fingerprint"], dict, "fingerprint").items()
            },
            [_round(measured) for measured in _of_kind(data["rounds"], list, "rounds")],
            {
                spec: _figures(spec, figures)
                for spec, figures in _of_kind(data["figures"], dict, "figures").items()
            },
            None if data["winner"] is None else _of_kind(data["winner"], str, "winner"),
        )
        if contestants is not None and record.fingerprint.get(THE_RACE) == str(contestants):
            _check_course(record, contestants)
        return record
    except ValueError as error:
        raise ValueError(f"race file {path} is not understood: {shown(error, 200)}") from None


def _of_kind(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {shown(value)}, and must be a {_KINDS[kind]}")
    return value


def _number(value: Any, what: str, least: float, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ValueError(
            f"{what} is {shown(value)}, and must be a number from {least:g} to {most:g}"
        )
    return float(value)


def _round(measured: Any) -> dict[str, list[float]]:
    turns = _of_kind(measured, dict, "a round")
    for spec, seconds in turns.items():
        if len(_of_kind(seconds, list, f"{shown(spec)} in a round")) != TURNS:
            raise ValueError(
                f"the schedule {shown(spec)} has {len(seconds)} turns in a round, and must have "
                f"{TURNS}"
            )
    return {
        spec: [_number(one, f"a turn of {shown(spec)}", *_SECONDS) for one in seconds]
        for spec, seconds in turns.items()
    }


def _figures(spec: str, figures: Any) -> RaceFigures:
    given = _of_kind(figures, dict, f"figures, {shown(spec)}")
    if given.keys() != _RANGES.keys():
        raise ValueError(
            f"the entry of the schedule {shown(spec)} must have these keys and no others: "
            f"{', '.join(_RANGES)}"
        )
    values = {
        name: None
        if given[name] is None and name in _MAY_BE_UNKNOWN
        else _number(given[name], f"{name} of {shown(spec)}", *limits)
        for name, limits in _RANGES.items()
    }
    return RaceFigures(**values)  # type: ignore[arg-type]


def _check_course(record: RaceRecord, contestants: Contestants) -> None:
    """Raise ValueError unless ``record`` is consistent with a race of ``contestants``.

    Each round must have the schedules that earlier rounds have left in the race, and the winner
    must follow from the rounds.
    """
    timed = {spec for measured in record.rounds for spec in measured}
    strangers = (timed | record.figures.keys()) - set(contestants.specs)
    if strangers or timed - record.figures.keys():
        raise ValueError("rounds and figures name other schedules than those that raced")
    # Schedules of the race without a time could not be built.
    race = Race(
        contestants.baseline,
        [spec for spec in contestants.candidates if spec in timed],
    )
    for number, measured in enumerate(record.rounds, 1):
        if race.is_over or measured.keys() != {race.baseline, *race.candidates}:
            raise ValueError(
                f"round {number} has other schedules than those that the earlier rounds left in "
                "the race"
            )
        race.add_round(measured)
    ended = race.winner if race.is_over else None
    if record.winner != ended:
        raise ValueError(
            f"the recorded winner is {record.winner}, but by the recorded rounds it is {ended}"
        )


def first_difference(fingerprint: Mapping[str, str], recorded: Mapping[str, str]) -> str:
    """Return, in words, the first difference between ``fingerprint`` and ``recorded``; "" if there
    is none."""
    for name in [*fingerprint, *recorded]:
        here, there = (facts.get(name, "nothing") for facts in (fingerprint, recorded))
        if here != there:
            return f"{name} was {there} there and is {here} here"
    return ""
