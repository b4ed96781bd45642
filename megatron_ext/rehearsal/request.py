"""Request to rehearse one rank, as a file from the command to the process of that rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.base.text_file import LARGEST_JSON, parse_json, read_text_file, write_text_file
from megatron_ext.observe.json_record import Record

REQUEST = "request.json"  # in the folder of a rehearsed rank
RECORD = "record.json"
FAILURE = "failure.txt"  # why a rank has no record, in one line
_VERSION = 1


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


def save_request(request: RankRequest) -> Path:
    """Write ``request`` into its folder, which is made. Return the file. Raises OSError."""
    request.folder.mkdir(parents=True, exist_ok=True)
    path = request.folder / REQUEST
    write_text_file(path, json.dumps({"version": _VERSION, **_as_data(request)}, indent=1) + "\n")
    return path


def _as_data(request: RankRequest) -> dict[str, Any]:
    paths = {name: path and str(path) for name, path in _paths(request).items()}
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
    )
