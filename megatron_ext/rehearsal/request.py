"""Request to rehearse one rank, as a file from the command to the process of that rank. With the
file a rank can be run by itself (`server`)."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.base.text_file import LARGEST_JSON, parse_json, read_text_file, write_text_file
from megatron_ext.observe.json_record import Record

REQUEST = "request.json"  # name of the request's file in the folder of a rehearsed rank
RECORD = "record.json"
FAILURE = "failure.txt"  # name of the file with one line that says why a rank has no record
FORWARD, BACKWARD = "forward", "backward"  # directions of messages
_VERSION = 2


class PeerValues(enum.StrEnum):
    """Kinds of values that made-up peers send: zeros, normal random numbers, or real tensors."""

    ZEROS = "zeros"
    NORMAL = "normal"
    REAL = "real"


@dataclass(frozen=True)
class ReplayRequest:
    """Times of the messages and collectives of a rank in the timed steps of its second run.

    Attributes:
        moved: for each channel, and each kind of collective, the seconds after the start of the
            step at which its messages are complete, in the order in which the rank posts them.
        ctas: number of thread blocks that NCCL occupies for a message of a communicator without a
            limit.
        has_blocks: whether waiting messages occupy thread blocks of the GPU.
    """

    moved: Mapping[str, tuple[float, ...]]
    ctas: int = 1
    has_blocks: bool = True


@dataclass(frozen=True)
class RankRequest:
    """Request to rehearse one rank alone.

    Attributes:
        rank, world_size: global rank, and number of ranks of the launch.
        script: script or module of the launch.
        arguments: arguments of the script, in which no schedule is left to be searched for.
        folder: folder of the rank's record.
        warm_up: number of training steps before the timed ones.
        steps: number of timed steps.
        is_cpu: whether the rank runs without a GPU.
        is_module: whether ``script`` is the name of a module.
        neighbour: record of a rank that ran before. In a direction in which this rank sends
            nothing, the values that it receives are as large as that rank's. None if no rank ran
            before.
        environment: variables that the launch command sets.
        replay: times at which messages are complete; None: at once.
        values: kind of values that peers send. With real ones the rank also writes a tensor that it
            sends in each direction into ``folder`` (`sent_file`).
        received: files of real tensors that other ranks have sent, by direction.
    """

    rank: int
    world_size: int
    script: str
    arguments: tuple[str, ...]
    folder: Path
    warm_up: int = 2
    steps: int = 3
    is_cpu: bool = False
    is_module: bool = False
    neighbour: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    replay: ReplayRequest | None = None
    values: PeerValues = PeerValues.NORMAL
    received: Mapping[str, Path] = field(default_factory=dict)


def sent_file(folder: Path, direction: str) -> Path:
    """Return the file of a tensor that the rank with this ``folder`` has sent in ``direction``."""
    return folder / f"sent_{direction}.pt"


def save_request(request: RankRequest) -> Path:
    """Write ``request`` as a file into its folder, and return the path. The folder may be new.

    Raises:
        OSError: the file cannot be written.
    """
    request.folder.mkdir(parents=True, exist_ok=True)
    path = request.folder / REQUEST
    write_text_file(path, json.dumps({"version": _VERSION, **_as_data(request)}, indent=1) + "\n")
    return path


def _as_data(request: RankRequest) -> dict[str, Any]:
    paths: dict[str, Any] = {name: path and str(path) for name, path in _paths(request).items()}
    paths["received"] = {name: str(path) for name, path in request.received.items()}
    return asdict(request) | paths


def _paths(request: RankRequest) -> dict[str, Path | None]:
    return {"folder": request.folder, "neighbour": request.neighbour}


def load_request(path: Path) -> RankRequest:
    """Return the request in the file ``path``.

    Raises:
        ValueError: the file cannot be read, is of another version, or is no request.
    """
    data = parse_json(read_text_file(path, "request", LARGEST_JSON))
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise ValueError(
            f"request {path} is not of version {_VERSION}: rehearse the schedule again"
        )
    record = Record(data, f"request {path}")
    return RankRequest(
        rank=record.count("rank"),
        world_size=record.count("world_size"),
        script=record.text("script"),
        arguments=record.texts("arguments"),
        folder=Path(record.text("folder")),
        warm_up=record.count("warm_up"),
        steps=record.count("steps"),
        is_cpu=record.truth("is_cpu"),
        is_module=record.truth("is_module"),
        neighbour=None if data.get("neighbour") is None else Path(record.text("neighbour")),
        environment=record.texts_by_name("environment"),
        replay=_replay(data.get("replay"), record.where),
        values=PeerValues(record.text("values")),
        received={n: Path(one) for n, one in record.texts_by_name("received").items()},
    )


def _replay(data: Any, where: str) -> ReplayRequest | None:
    if data is None:
        return None
    record = Record(data if isinstance(data, dict) else {}, f"{where}, replay")
    times = record.data.get("moved")
    by_name = Record(times if isinstance(times, dict) else {}, f"{record.where}, moved")
    moved = {name: by_name.amounts(name) for name in by_name.data}
    return ReplayRequest(moved, record.count("ctas"), record.truth("has_blocks"))
