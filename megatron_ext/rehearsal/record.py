"""Record of one rehearsed rank: its passes, seconds, bytes and sent values, as a file.

A rank runs in a process that ends, and later ranks and the report need what it has seen. The file
is written whole or not at all, and checked when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.base.text_file import LARGEST_JSON, parse_json, read_text_file, write_text_file
from megatron_ext.observe.json_record import Record
from megatron_ext.schedule.action import Action, parse_action, slices_named

_VERSION = 1


class RehearsedPass(NamedTuple):
    """Pass of a rank, and its start and end in seconds after the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class RehearsedStep:
    """Timed step of a rehearsed rank.

    Attributes:
        passes: passes of the step, in the order in which they ran.
        seconds: seconds of the whole training step, with the optimizer.
        host_seconds: seconds that the host spends between passes, from the first pass to the last,
            without its waits for the device.
    """

    passes: tuple[RehearsedPass, ...]
    seconds: float
    host_seconds: float = 0.0


@dataclass(frozen=True)
class SentValues:
    """Size of the values that a rank sends in one direction.

    Attributes:
        direction: ``forward``, ``backward``, or the name of a collective of the partitioned
            vocabulary.
        rms: root mean square of the values.
        shape, dtype: shape and type of a tensor that is sent.
    """

    direction: str
    rms: float
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class RankRecord:
    """Record of a rehearsed rank.

    Attributes:
        rank, world_size: global rank, and number of ranks of the launch.
        pipeline_rank: place of the rank in its pipeline.
        schedule: name of the schedule that ran, which may be one of Megatron's own.
        digest: digest of the program; "" for Megatron's own schedules, which have none.
        trained: number of training steps of the process, the timed ones included.
        steps: the timed steps.
        allocated: most bytes that tensors took in a timed step, without ``pool``; None without a
            GPU.
        reserved: most bytes that torch's allocator had reserved, without ``pool``; None without a
            GPU.
        pool: bytes from which the values of made-up peers are cut, and which no training has.
        lasting: bytes of tensors that exist between steps, such as weights and optimizer states,
            without ``pool``; None without a GPU.
        sent: size of the values that the rank sent in its first step, by direction.
    """

    rank: int
    world_size: int
    pipeline_rank: int
    schedule: str
    digest: str
    trained: int
    steps: tuple[RehearsedStep, ...]
    allocated: int | None = None
    reserved: int | None = None
    pool: int = 0
    lasting: int | None = None
    sent: tuple[SentValues, ...] = ()


def save_rank_record(record: RankRecord, path: Path) -> None:
    """Write ``record`` to the file ``path``. The file is written whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    data = asdict(record)
    data["steps"] = [
        {**asdict(step), "passes": [[str(a), start, end] for a, start, end in step.passes]}
        for step in record.steps
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_file(path, json.dumps({"version": _VERSION, **data}) + "\n")


def load_rank_record(path: Path) -> RankRecord:
    """Return the record of a rank in the file ``path``.

    Raises:
        ValueError: the file cannot be read, is of another version, or is no record of a rank.
    """
    data = parse_json(read_text_file(path, "record of a rank", LARGEST_JSON))
    where = f"record of a rank {path}"
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise ValueError(f"{where} is not of version {_VERSION}: rehearse the schedule again")
    record = Record(data, where)
    return RankRecord(
        rank=record.count("rank"),
        world_size=record.count("world_size"),
        pipeline_rank=record.count("pipeline_rank"),
        schedule=record.text("schedule"),
        digest=record.text("digest"),
        trained=record.count("trained"),
        steps=tuple(map(_step, record.objects("steps"))),
        allocated=_optional(record, "allocated"),
        reserved=_optional(record, "reserved"),
        pool=record.count("pool"),
        lasting=_optional(record, "lasting"),
        sent=tuple(map(_sent, record.objects("sent"))),
    )


def _optional(record: Record, key: str) -> int | None:
    return None if record.data.get(key) is None else record.count(key)


def _step(record: Record) -> RehearsedStep:
    passes = record.data.get("passes")
    if not isinstance(passes, list) or not all(_is_row(row, 3) for row in passes):
        raise ValueError(
            f"{record.where}: 'passes' must be a list of actions, each with its start and end"
        )
    return RehearsedStep(
        _passes(passes, record.where), record.number("seconds"), record.number("host_seconds")
    )


def _is_row(row: Any, length: int) -> bool:
    if not isinstance(row, list) or len(row) != length or not isinstance(row[0], str):
        return False
    return all(isinstance(one, int | float) and abs(one) < 1e18 for one in row[1:])


def _passes(rows: Sequence[Any], where: str) -> tuple[RehearsedPass, ...]:
    try:
        slices = slices_named(" ".join(text for text, _, _ in rows))
        passes = tuple(RehearsedPass(parse_action(text, slices), a, b) for text, a, b in rows)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if any(one.end < one.start for one in passes) or any(
        later.start < one.start for one, later in pairwise(passes)
    ):
        raise ValueError(
            f"{where}: its passes are not in the order of their starts, or one ends before it "
            "starts"
        )
    return passes


def _sent(record: Record) -> SentValues:
    shape = tuple(int(size) for size in record.amounts("shape"))
    return SentValues(record.text("direction"), record.number("rms"), shape, record.text("dtype"))
