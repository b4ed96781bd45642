"""A launch read from the log of an earlier start.

Megatron's rank 0 prints the arguments of a training, as its validation has completed them:

    ------------------------ arguments ------------------------
      hidden_size ..................................... 4096
    -------------------- end of arguments ---------------------

A launcher may have put the rank or the time before each line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext.compile.registry import file_of
from megatron_ext.config import PREFIX, flag
from megatron_ext.cost_model.gpus import name_of_gpu
from megatron_ext.launch_command import bridge_recipe
from megatron_ext.launch_command.importing import as_on, quickly, silently
from megatron_ext.launch_command.words import Launch, read_launch
from megatron_ext.patches.engine import PatchError
from megatron_ext.secrets import masked
from megatron_ext.words import counted, shown
from megatron_ext.written_settings import Given, given_and_others

OPTION = "--megatron-args"
_SCRIPT = "pretrain_gpt.py"  # assumed: no log names its script
_USUAL = 8  # GPUs of a node
_COLUMN = 48  # in which the values begin: a name and its dots

_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_BEGINS = re.compile(r"-{20,} arguments -{20,}")
_ENDS = re.compile(r"-{20,} end of arguments -{20,}")
_ARGUMENT = re.compile(r"  ([A-Za-z_]\w*) (\.*) (.*)")
# What srun -l, torchrun and torch's loggers put before a line of a rank.
_RANK = re.compile(r"^\s*(\d+): |\[(?:rank|default)?(\d+)\]:")
_OF_NODE = re.compile(r"\bnproc[-_]per[-_]node\s*[:= ]\s*(\d+)\b")
_GPU = re.compile(r"(?:NVIDIA|AMD Instinct) (\w+(?:[ -]\w+)?)")
_VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_CALLED_DIFFERENT = 3  # names that a remark lists


@dataclass(frozen=True)
class Log:
    """The parts of a training's log that tell how it was launched.

    Attributes:
        arguments: of the first whole block, as text, by their names.
        different: names of arguments that have another value in a later block.
        of_node: ranks of a node; None if the log does not tell.
        gpu: name of the GPU's data sheet; None if the log does not tell, or names several.
        vocabulary: tokens, padded; None if the log does not tell.
    """

    arguments: Mapping[str, str]
    different: tuple[str, ...] = ()
    of_node: int | None = None
    gpu: str | None = None
    vocabulary: int | None = None


@dataclass
class _Block:
    arguments: dict[str, str] = field(default_factory=dict)
    is_whole: bool = False


def read_log(lines: Iterable[str]) -> Log:
    """Return what the ``lines`` of a log tell.

    Raises:
        ValueError: there is no block of arguments in it, or none is whole.
    """
    blocks: list[_Block] = []
    open_blocks: dict[str, _Block] = {}  # by rank
    of_node: int | None = None
    vocabulary: int | None = None
    gpus: set[str] = set()
    for line in lines:
        text = _COLOUR.sub("", line.rstrip("\r\n"))
        found = _RANK.search(text)
        rank = "" if found is None else found[1] or found[2]
        if _BEGINS.search(text):
            open_blocks[rank] = _Block()
            blocks.append(open_blocks[rank])
        elif _ENDS.search(text):
            if rank in open_blocks:
                open_blocks.pop(rank).is_whole = True
        elif rank in open_blocks:
            for name, value in _arguments(text):
                open_blocks[rank].arguments.setdefault(name, value)
        else:
            if of_node is None and (found := _OF_NODE.search(text)):
                of_node = int(found[1])
            if vocabulary is None and (found := _VOCABULARY.search(text)):
                vocabulary = int(found[1])
            gpus.update(filter(None, map(name_of_gpu, _GPU.findall(text))))
    arguments, *others = _whole(blocks)
    different = {
        name
        for other in others
        for name in arguments.keys() | other.keys()
        if arguments.get(name) != other.get(name)
    }
    gpu = gpus.pop() if len(gpus) == 1 else None
    return Log(arguments, tuple(sorted(different - {"rank"})), of_node, gpu, vocabulary)


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """Yield the argument of a line, if it has one: dots fill a name to `_COLUMN` characters."""
    for found in re.finditer(r"(?=  [A-Za-z_])", text):
        argument = _ARGUMENT.match(text, found.start())
        if argument and len(argument[2]) == max(_COLUMN - len(argument[1]), 0):
            yield argument[1], argument[3]
            return


def _whole(blocks: list[_Block]) -> list[dict[str, str]]:
    whole = [block.arguments for block in blocks if block.is_whole]
    if whole:
        if not whole[0].get("world_size", "").isdigit():
            count = counted(len(whole[0]), "argument")
            raise ValueError(
                f"the block of arguments has no number as world_size ({count} read), so it is not "
                f"one of Megatron's; give the log as it was written"
            )
        return whole
    if not blocks:
        raise ValueError(
            "there are no arguments of Megatron in it, which rank 0 prints at the start of a "
            "training beneath a line '---- arguments ----'; give the whole log of rank 0"
        )
    last = next(reversed(blocks[0].arguments), "its first line")
    raise ValueError(
        f"the block of arguments is cut off after {last}: the line '---- end of arguments ----' "
        f"is missing; give the log down to that line"
    )


def launch_from(words: Sequence[str], log: Path | None, recipe: str | None = None) -> Launch:
    """Return the launch that the command ``words`` starts, that the ``log`` is of, or that trains
    the config of a Megatron-Bridge ``recipe``.

    Raises:
        ValueError: two are given, or as `read_launch`, `launch_from_log`, `launch_from_recipe`.
        PatchError: as `launch_from_log`.
    """
    if recipe is not None:
        if log is not None:
            raise ValueError(
                f"{OPTION} {log} and {bridge_recipe.OPTION} {recipe} each tell the arguments: "
                f"give only one of the two"
            )
        return bridge_recipe.launch_from_recipe(recipe, words)
    if log is None:
        return read_launch(words)
    settings, others = given_and_others(words)
    if others:
        raise ValueError(
            f"{OPTION} {log} and a launch command, {masked(others[:3])!r}, are both given, and "
            f"each has the arguments: give only one of the two; flags of ours may follow behind --"
        )
    return launch_from_log(log, settings)


def launch_from_log(path: Path, settings: Given | None = None) -> Launch:
    """Return the launch of the training that wrote the log ``path``, with ``settings`` of a command
    line in place of its own.

    A log is data, which others may have written: what it names is not imported.

    Raises:
        ValueError: the log cannot be read, does not tell, or names a schedule that is a program.
        PatchError: Megatron, which knows the flags, is not installed.
    """
    settings = settings or {}
    try:
        with path.open(errors="replace") as lines:
            log = read_log(lines)
    except OSError as error:
        raise ValueError(
            f"{OPTION} {path}: {error.strerror}; write the path of a training's log"
        ) from None
    except ValueError as error:
        raise ValueError(f"{OPTION} {path}: {error}") from None
    given = {f"{PREFIX}{name}": str(value) for name, value in settings.items()}
    printed = {**log.arguments, **given}
    for name in ("schedule", "race"):
        if PREFIX + name not in given:
            _refuse_program(path, name, printed.get(PREFIX + name, ""))
    with silently(), as_on(None, {"HF_HUB_OFFLINE": "1"}):
        try:
            with quickly():
                from megatron_ext.launch_command.log.unparse import unparse
        except ImportError as error:
            raise PatchError(
                f"{OPTION} needs Megatron, which cannot be imported here: {error}; of the working "
                f"directory nothing is imported for a log, so set PYTHONPATH to a checkout"
            ) from error
        try:
            unparsed = unparse(printed)
        except ValueError as error:
            raise ValueError(
                f"{OPTION} {path}: this Megatron does not take what the log has: {error}; "
                f"correct it in a copy of the log"
            ) from error
    words = unparsed.words
    if log.vocabulary is not None and "--padded-vocab-size" not in words:
        words += ("--padded-vocab-size", str(log.vocabulary))  # known after the arguments
    ranks = int(log.arguments["world_size"])
    of_node = log.of_node or _gpus_of_node(ranks)
    remarks = [
        f"read from {path}: {counted(ranks, 'rank')}, {of_node} on each node "
        f"({'as the log says' if log.of_node else 'assumed'}); the script is not in it, "
        f"{_SCRIPT} is assumed"
    ]
    if log.gpu is not None:
        remarks.append(f"the log names the GPU: {log.gpu}")
    if log.different:
        names = _listed(log.different)
        remarks.append(f"the log has other arguments further down, the first are taken: {names}")
    if unparsed.unknown:
        names = ", ".join(unparsed.unknown)
        remarks.append(f"this Megatron does not know, and they are ignored: {names}")
    remarks += unparsed.differences
    return Launch(
        _SCRIPT,
        is_module=False,
        arguments=words,
        world_size=ranks,
        installs=f"{PREFIX}schedule" in printed,
        log=path,
        remarks=tuple(remarks),
        gpu=log.gpu,
    )


def _refuse_program(path: Path, name: str, text: str) -> None:
    """Raise ValueError if the log ``path`` has a Python file in the setting ``name``."""
    for spec in (text, *text.split()):
        file = file_of(spec)
        if file is not None and file.suffix == ".py":
            raise ValueError(
                f"{OPTION} {path}: the log has {flag(name)} {shown(text)}, which is a program, and "
                f"a log runs none: if you trust the file, name it on the command line: "
                f"{OPTION} {path} -- {flag(name)} {shlex.quote(text)}"
            )


def _gpus_of_node(ranks: int) -> int:
    """Return the most ranks up to `_USUAL` that nodes can have alike."""
    return max(count for count in range(1, _USUAL + 1) if ranks % count == 0)


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _CALLED_DIFFERENT
    text = ", ".join(names[:_CALLED_DIFFERENT])
    return f"{text} and {more} more" if more > 0 else text
