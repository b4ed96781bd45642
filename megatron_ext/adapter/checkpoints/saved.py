"""Reader of a checkpoint's own metadata: arguments, shapes of tensors, kind of optimizer states.

Tensors are not read, and nothing that the checkpoint names is imported or run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ext.adapter.checkpoints.plain_pickle import read_pickle, read_saved
from megatron_ext.base.text_file import LARGEST_JSON, parse_json, read_text_file
from megatron_ext.base.words import bytes_text

_CONFIG, _INDEX, _COMMON = "metadata.json", ".metadata", "common.pt"
_COMMON_KEY = "common_state"
_LARGEST_COMMON = 2**28  # largest common.pt in bytes; Megatron's files have about 10,000


@dataclass(frozen=True)
class SavedTraining:
    """Metadata of a checkpoint, which tell whether a launch can load it.

    Attributes:
        args: Megatron's arguments of the run that saved the checkpoint; None if there are none.
        metadata: the format of the optimizer states, and the rank of each stage if one of our
            schedules placed the stages.
        scheduler: the state of the learning-rate schedule; None if there is none.
        sizes: the shape of each tensor by its name; empty if not read.
    """

    args: Any
    metadata: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None = None
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Incomplete(ValueError):
    """Error: no command can load the checkpoint, because a part of the checkpoint is missing."""


def read(folder: Path) -> SavedTraining:
    """Read the metadata of the checkpoint in ``folder``, the folder of one iteration.

    Raises:
        Incomplete: a part is missing, for example after an interrupted copy.
        ValueError: the checkpoint has another format, or cannot be read; the text says why.
    """
    try:
        _check_format(folder)
        index = _index(folder)
        common = _common(folder, index)
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: {error.strerror or error}") from None
    if not isinstance(common, dict):
        raise ValueError("the checkpoint has no state that all ranks share")
    metadata, scheduler = common.get("content_metadata"), common.get("opt_param_scheduler")
    shapes = getattr(index, "state_dict_metadata", {})
    return SavedTraining(
        common.get("args"),
        metadata if isinstance(metadata, dict) else {},
        scheduler if isinstance(scheduler, dict) else None,
        {
            name: tuple(tensor.size)
            for name, tensor in shapes.items()
            if isinstance(getattr(tensor, "size", None), tuple)
        },
    )


def _check_format(folder: Path) -> None:
    names = {entry.name for entry in os.scandir(folder)}
    if _CONFIG in names:
        config = parse_json(read_text_file(folder / _CONFIG, "the file", LARGEST_JSON))
        backend = config.get("sharded_backend") if isinstance(config, dict) else None
        if backend != "torch_dist":
            raise ValueError(
                f"the checkpoint's format is {backend}, and only torch_dist can be read here"
            )
        if _INDEX not in names:
            raise Incomplete(f"the checkpoint has no {_INDEX}, the file that is written last")
    elif any(name.startswith("mp_rank_0") for name in names):
        raise ValueError(
            "the checkpoint is of format torch, which has one file per rank and can only be "
            "loaded by a run with the same stages: convert it by --ckpt-convert-format "
            "torch_dist --ckpt-convert-save FOLDER"
        )
    elif _INDEX in names:
        raise ValueError(
            "the checkpoint is of format torch_dcp or fsdp_dtensor, and only torch_dist can be "
            "read here"
        )
    else:
        raise Incomplete(
            f"the checkpoint has no {_CONFIG}, without which Megatron does not know its format"
        )


def _index(folder: Path) -> Any:
    """Return the index of a checkpoint's tensors, after checking that the files it names exist."""
    index = read_pickle(folder / _INDEX)
    ends: dict[str, int] = {}
    for _, place in _places(index):
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            raise Incomplete(f"the checkpoint has no {name}, a file that {_INDEX} names")
        if path.stat().st_size < end:
            raise Incomplete(
                f"the checkpoint's file {name} has {path.stat().st_size} bytes, and {end} "
                f"according to {_INDEX}"
            )
    return index


def _places(index: Any) -> Iterator[tuple[str, Any]]:
    """Yield, for each entry of a checkpoint's index, its name and its place in a file."""
    storage = getattr(index, "storage_data", None)
    for key, place in storage.items() if isinstance(storage, dict) else ():
        if isinstance(getattr(place, "relative_path", None), str):
            yield str(getattr(key, "fqn", "")), place


def _common(folder: Path, index: Any) -> Any:
    """Return the part of a checkpoint's state that all ranks share.

    Before Megatron 0.19 this part has a file of its own.
    """
    if (folder / _COMMON).is_file():
        return read_saved(folder / _COMMON)
    places = [place for name, place in _places(index) if name.startswith(f"{_COMMON_KEY}/")]
    if not places:
        raise ValueError("the checkpoint has no state that all ranks share")
    (place,) = places
    if getattr(place, "transform_descriptors", None):
        raise ValueError("the checkpoint's files are compressed, and cannot be read here")
    if place.length > _LARGEST_COMMON:
        raise ValueError(
            f"the checkpoint's state that all ranks share has {bytes_text(place.length)}, which "
            "is too much to read"
        )
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        data = file.read(place.length)
    saved = read_saved(data)
    return saved[0] if isinstance(saved, list) and saved else saved
