"""A launch described by a file: one JSON object of Megatron's arguments by their names.

Frameworks that call Megatron have such objects and no command. The file is data: no code that it
names runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.base.text_file import LARGEST_JSON, parse_json, read_text_file
from megatron_ext.base.words import counted, shown
from megatron_ext.launch.command.importing import as_on, quickly, silently
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.patches.engine import PatchError
from megatron_ext.written_settings import given_in

# Settings of a vision tower, which Megatron's parser does not have.
VISION = (
    *("vision", "vision_tokens"),
    *("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"),
)
_WORLD_SIZE = "world_size"  # key of the world size in a file of arguments
_MOST_RANKS = 10_000_000
_SCRIPT = "pretrain_gpt.py"  # assumed script, since a file of arguments names none


@dataclass(frozen=True)
class ArgumentsFile:
    """Contents of a file of arguments.

    Attributes:
        values: Megatron's arguments by name, without the number of ranks.
        world_size: number of ranks; None if the file does not tell.
    """

    path: Path
    values: Mapping[str, Any]
    world_size: int | None


def read_arguments_file(path: Path) -> ArgumentsFile:
    """Return the contents of the file of arguments ``path``.

    Raises ValueError if it is no JSON object.
    """
    text = read_text_file(path, "file of arguments", LARGEST_JSON)
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON file: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: the file has to contain one JSON object of Megatron's arguments")
    ranks = values.pop(_WORLD_SIZE, None)
    is_count = isinstance(ranks, int) and not isinstance(ranks, bool)
    if ranks is not None and not (is_count and 0 < ranks <= _MOST_RANKS):
        raise ValueError(
            f"{path}: {_WORLD_SIZE} {shown(ranks)!r} is not a number of ranks; write a number from "
            f"1 to {_MOST_RANKS:,}"
        )
    return ArgumentsFile(path, values, ranks)


def launch_from_arguments(path: Path, flags: Sequence[str]) -> Launch:
    """Return the launch with Megatron's arguments from the file ``path``, and ``flags`` of ours.

    Raises:
        ValueError: the file cannot be read, or an argument or its value is not Megatron's.
        PatchError: Megatron, which knows the flags, is not installed.
    """
    file = read_arguments_file(path)
    with silently(), as_on(None, {"HF_HUB_OFFLINE": "1"}):
        try:
            with quickly():
                from megatron_ext.launch.command.log.unparse import unparsed_flags
                from megatron_ext.launch.command.megatron_arguments import parse_values
        except ImportError as error:
            raise PatchError(
                f"{path}: Megatron is needed to read its arguments, and cannot be imported here: "
                f"{error}"
            ) from error
        values = {name: value for name, value in file.values.items() if name not in VISION}
        try:
            defaults = vars(parse_values({}).args)
            given = {
                name: str(value)
                for name, value in vars(parse_values(values).args).items()
                if value != defaults[name]
            }
            words = unparsed_flags(given)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    remarks = [f"read from {path}: the script is not in it, {_SCRIPT} is assumed"]
    if towers := [name for name in VISION if name in file.values]:
        remarks.append(
            f"{', '.join(towers)}: {counted(len(towers), 'setting')} of a vision tower, which only "
            f"a plan knows, and no flag of Megatron's; ignored here"
        )
    return Launch(
        _SCRIPT,
        is_module=False,
        arguments=(*words, *flags),
        world_size=file.world_size,
        installs="schedule" in given_in(flags),
        log=path,
        remarks=tuple(remarks),
    )
