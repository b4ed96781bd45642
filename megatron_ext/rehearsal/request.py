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
    """Values that made-up peers send."""

    ZEROS = "zeros"
    NORMAL = "normal"
    REAL = "real"


@dataclass(frozen=True)
class ReplayRequest:
    """Times of the messages and collectives of a rank in the timed steps.

    Attributes:
        moved: seconds from the begin of the step at which those of each channel, or of each kind of
            collective, have moved, in the rank's order.
        ctas: thread blocks that NCCL would occupy for a message whose communicator has no limit.
        has_blocks: whether waiting messages occupy thread blocks on a GPU.
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
        arguments: words after the script. They are final: nothing is searched or gathered.
        folder: folder of the rank's record.
        warm_up: number of training steps before the timed ones.
        steps: number of timed steps.
        is_cpu: whether the rank runs without a GPU.
        is_module: whether ``script`` is the name of a module.
        neighbour: record of a rank that ran before, whose sent values give the size of values in a
            direction in which this rank sends none; None: there is none.
        environment: variables that the launch command sets.
        replay: when messages move; None: at once.
        values: values that peers send. With real ones the rank also writes a tensor that it sends
            in each direction into ``folder`` (`sent_file`).
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
    """Return the file of a tensor that the rank of ``folder`` has sent in ``direction``."""
    return folder / f"sent_{direction}.pt"


def save_request(request: RankRequest) -> Path:
    """Write ``request`` into its folder, which is made. Return the file. Raises OSError."""
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
    """Return the request in the file ``path``. Raises ValueError."""
    data = parse_json(read_text_file(path, "request", LARGEST_JSON))
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise ValueError(f"request {path} is not of version {_VERSION}: rehearse again")
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
