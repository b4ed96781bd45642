"""Measurements of a race, as a file: the next start of the same training goes on with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_ext.race.rounds import Round
from megatron_ext.text_file import LARGEST_JSON, parse_json, read_text_file, write_text_file
from megatron_ext.words import shown

NAME = "race.json"  # in the folder of the checkpoints
_VERSION = 1


@dataclass(frozen=True)
class RaceFigures:
    """Measured bubble and peak memory of a schedule, and the predicted ones.

    Attributes:
        bubble, predicted_bubble: idle share of the makespan, over the ranks of a pipeline.
        peak, predicted_peak: bytes that activations take on the rank with the most; None where
            that is unknown.
        peak_microbatches: the predicted peak of a rank.
    """

    bubble: float
    predicted_bubble: float
    peak: float | None
    predicted_peak: float | None
    peak_microbatches: float


@dataclass(frozen=True)
class RaceRecord:
    """Measurements of a race with which the next start goes on.

    Attributes:
        subject: facts about the training, its machine and the race. Measurements count only if all
            of them are the same.
        rounds: measurements of the complete rounds.
        figures: by schedule.
        winner: the best schedule, or the baseline if none is faster; None while the race goes on.
    """

    subject: Mapping[str, str]
    rounds: list[Round] = field(default_factory=list)
    figures: Mapping[str, RaceFigures] = field(default_factory=dict)
    winner: str | None = None


def save_record(record: RaceRecord, path: Path) -> None:
    """Write ``record`` to ``path``, whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_file(path, json.dumps({"version": _VERSION, **asdict(record)}, indent=2) + "\n")


def load_record(path: Path) -> RaceRecord:
    """Return the record at ``path``.

    Raises:
        ValueError: the file cannot be read, is no record, or is of another version.
    """
    text = read_text_file(path, "race file", LARGEST_JSON)
    try:
        data = parse_json(text)
        if (version := data.pop("version")) != _VERSION:
            raise ValueError(f"its version is {shown(version)}, and only {_VERSION} is known")
        data["figures"] = {
            spec: RaceFigures(**figures) for spec, figures in data["figures"].items()
        }
        return RaceRecord(**data)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"race file {path} is not understood: {shown(error, 200)}") from None


def difference(subject: Mapping[str, str], recorded: Mapping[str, str]) -> str:
    """Return, in words, the first difference between ``subject`` and ``recorded``; "" if none."""
    for name in [*subject, *recorded]:
        here, there = (facts.get(name, "nothing") for facts in (subject, recorded))
        if here != there:
            return f"{name} was {there} there and is {here} here"
    return ""
