"""A launch read from the log of an earlier start.

Megatron's rank 0 prints the arguments of a training, as its validation has completed them:

    ------------------------ arguments ------------------------
      hidden_size ..................................... 4096
    -------------------- end of arguments ---------------------

A launcher may have put the rank or the time before each line.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from megatron_ext.base.words import counted, shown
from megatron_ext.compile.feature_settings import NAMING_SCHEDULES
from megatron_ext.compile.registry import file_of
from megatron_ext.config import PREFIX, flag
from megatron_ext.cost_model.gpus import name_of_gpu
from megatron_ext.launch.command.importing import as_on, quickly, silently
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.command.log.log_figures import FIGURE_LINES, FiguresReader, LogFigures
from megatron_ext.patches.engine import PatchError
from megatron_ext.written_settings import Given

_SCRIPT = "pretrain_gpt.py"  # assumed script, since a log names none
_USUAL = 8  # usual number of GPUs of a node
_COLUMN = 48  # column of a log line in which values begin, after a name and dots

_LONGEST = 2**22  # largest number of bytes that are read at a time, and longest line in bytes
_LARGEST = 2**26  # largest number of characters in the blocks of arguments
_BEFORE = 1000  # an argument's name begins within this many characters of its line
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_DASHES = "-" * 20
_BEGINS, _ENDS = (f"{_DASHES} {what} {_DASHES}" for what in ("arguments", "end of arguments"))
_INDENTED = re.compile(r"(?=  [A-Za-z_])")
_ARGUMENT = re.compile(r"  ([A-Za-z_]\w*) (\.*) (.*)")
# Prefixes that srun -l, torchrun and torch's loggers put before a line of a rank.
_RANK = re.compile(r"^\s*(\d+): |\[(?:rank|default)?(\d+)\]:")
_OF_NODE = re.compile(r"\bnproc[-_]per[-_]node\s*[:= ]\s*(\d+)\b")
_GPU = re.compile(r"(?:NVIDIA|AMD Instinct) (\w+(?:[ -]\w+){0,2})")
_VOCABULARY = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_TOLD = (b"nproc", b"NVIDIA", b"AMD Instinct", b"padded vocab", b"------", b" ..")
_MEASURED_IN = 16  # number of pieces of a log in which the times of iterations are looked for
_EVALUATION = "eval_interval"  # argument without which Megatron's parser does not accept a training
_USUAL_INTERVAL = "1000"  # Megatron's default interval before 0.19
_CALLED_DIFFERENT = 3  # largest number of differing names that a remark lists


@dataclass(frozen=True)
class Log:
    """Parts of a training's log that tell how it was launched.

    Attributes:
        arguments: arguments of the first complete block, as text, by name.
        different: names of arguments with another value in a later block.
        of_node: number of ranks on a node; None if the log does not tell.
        gpu: the GPU's name in our table; None if the log does not tell, or names several.
        vocabulary: padded size of the vocabulary; None if the log does not tell.
        figures: seconds and bytes that the log tells.
    """

    arguments: Mapping[str, str]
    different: tuple[str, ...] = ()
    of_node: int | None = None
    gpu: str | None = None
    vocabulary: int | None = None
    figures: LogFigures = field(default_factory=LogFigures)


@dataclass
class _Blocks:
    """Blocks of arguments in a log that is being read: the first complete one, and open ones.

    A log has a block for each start of the training; no others are stored.
    """

    first: dict[str, str] | None = None
    different: set[str] = field(default_factory=set)
    # Blocks of arguments whose end has not been read, by rank.
    open_blocks: dict[str, dict[str, str]] = field(default_factory=dict)
    begun: dict[str, str] | None = None
    characters: int = 0  # number of characters in the open blocks

    def begin(self, rank: str) -> None:
        self.open_blocks[rank] = {}
        self.begun = self.open_blocks[rank] if self.begun is None else self.begun

    def take(self, rank: str, text: str) -> None:
        for name, value in _arguments(text):
            self.open_blocks[rank].setdefault(name, value)
            self.characters += len(name) + len(value)
        if self.characters > _LARGEST:
            raise ValueError(
                f"the blocks of arguments in the log have more than {_LARGEST:,} characters, more "
                "than Megatron prints"
            )

    def end(self, rank: str) -> None:
        block = self.open_blocks.pop(rank, None)
        if block is None:
            return
        self.characters -= sum(len(name) + len(value) for name, value in block.items())
        if self.first is None:
            self.first = block
        for name in self.first.keys() | block.keys():
            if self.first.get(name) != block.get(name):
                self.different.add(name)


def read_log(lines: Iterable[str]) -> Log:
    """Return what the ``lines`` of a log tell of the launch.

    The log may be larger than this machine's memory.

    Raises:
        ValueError: the log has no block of arguments, or none that is complete.
    """
    blocks = _Blocks()
    of_node: int | None = None
    vocabulary: int | None = None
    gpus: set[str] = set()
    figures = FiguresReader()
    for line in lines:
        text = _COLOUR.sub("", line.rstrip("\r\n"))
        found = _RANK.search(text, 0, _BEFORE)
        rank = "" if found is None else found[1] or found[2]
        if _BEGINS in text:
            blocks.begin(rank)
        elif _ENDS in text:
            blocks.end(rank)
        elif rank in blocks.open_blocks:
            blocks.take(rank, text)
        else:
            if of_node is None and (found := _OF_NODE.search(text)):
                of_node = _number(found[1])
            if vocabulary is None and (found := _VOCABULARY.search(text)):
                vocabulary = _number(found[1])
            gpus.update(filter(None, map(name_of_gpu, _GPU.findall(text))))
            figures.take(text)
    arguments = _complete_block(blocks)
    gpu = gpus.pop() if len(gpus) == 1 else None
    different = tuple(sorted(blocks.different - {"rank"}))
    return Log(arguments, different, of_node, gpu, vocabulary, figures.figures())


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of those parts of the log ``file`` that may tell something of the launch."""
    for number in itertools.count():
        if not (part := file.read(_LONGEST)):
            return
        part += file.readline(_LONGEST)
        looked_for = (*_TOLD, *FIGURE_LINES) if number < _MEASURED_IN else _TOLD
        if any(word in part for word in looked_for):
            text = part.decode(errors="replace")
            yield from text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _number(digits: str) -> int | None:
    """Return the number in ``digits``; None if it is too large for a number of ranks or tokens."""
    return int(digits) if 0 < len(digits.lstrip("0")) < 10 else None


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) of an argument that a line of a log prints, if it prints one.

    Dots fill a name to `_COLUMN` characters.
    """
    for found in _INDENTED.finditer(text, 0, _BEFORE):
        argument = _ARGUMENT.match(text, found.start())
        if argument and len(argument[2]) == max(_COLUMN - len(argument[1]), 0):
            yield argument[1], argument[3].rstrip()
            return


def _complete_block(blocks: _Blocks) -> dict[str, str]:
    if blocks.first is not None:
        if _number_of_ranks(blocks.first) is None:
            count = counted(len(blocks.first), "argument")
            raise ValueError(
                f"the log's block of arguments has no number as world_size ({count} read), so "
                "Megatron did not print it; give the log as it was written"
            )
        return blocks.first
    if blocks.begun is None:
        raise ValueError(
            "the log has none of the arguments that Megatron's rank 0 prints at the start of a "
            "training, below a line '---- arguments ----'; give the whole log of rank 0"
        )
    last = next(reversed(blocks.begun), "its first line")
    raise ValueError(
        f"the log's block of arguments is cut off after {last}: the line '---- end of arguments "
        "----' is missing; give the log down to that line"
    )


def _number_of_ranks(arguments: Mapping[str, str]) -> int | None:
    text = arguments.get("world_size", "")
    return _number(text) if text.isascii() and text.isdecimal() else None


def launch_from_log(path: Path, settings: Given | None = None) -> Launch:
    """Return the launch of the training that wrote the log ``path``.

    ``settings`` of a command line replace those in the log. A log is data, which others may have
    written: what it names is not imported.

    Raises:
        ValueError: the log cannot be read, lacks the arguments of the launch, or names a Python
            file as its schedule.
        PatchError: Megatron, which knows the flags, is not installed.
    """
    settings = settings or {}
    try:
        with path.open("rb") as file:
            log = read_log(_lines(file))
    except OSError as error:
        raise ValueError(
            f"log {path}: {error.strerror}; write the path of a training's log, or "
            f"another job that --help lists"
        ) from None
    except ValueError as error:
        raise ValueError(f"log {path}: {error}") from None
    given = {f"{PREFIX}{name}": str(value) for name, value in settings.items()}
    printed = {_EVALUATION: _USUAL_INTERVAL, **log.arguments, **given}
    for name in NAMING_SCHEDULES:
        if PREFIX + name not in given:
            _refuse_program(path, name, printed.get(PREFIX + name, ""))
    with silently(), as_on(None, {"HF_HUB_OFFLINE": "1"}):
        try:
            with quickly():
                from megatron_ext.launch.command.log.unparse import unparse
        except ImportError as error:
            raise PatchError(
                f"Megatron is needed to read a log, and cannot be imported here: {error}; modules "
                "in the working directory are not imported for a log, so set PYTHONPATH to a "
                "checkout of Megatron"
            ) from error
        try:
            unparsed = unparse(printed)
        except ValueError as error:
            raise ValueError(
                f"log {path}: the installed Megatron does not accept the log's arguments: "
                f"{error}; correct them in a copy of the log"
            ) from error
    words = unparsed.words
    if log.vocabulary is not None and "--padded-vocab-size" not in words:
        # Megatron sets the padded vocabulary size after it has printed the arguments.
        words += ("--padded-vocab-size", str(log.vocabulary))
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
        figures=log.figures,
    )


def _refuse_program(path: Path, name: str, text: str) -> None:
    """Raise ValueError if the log ``path`` has a Python file as the value of ``name``."""
    for spec in (text, *text.split()):
        file = file_of(spec)
        if file is not None and file.suffix == ".py":
            raise ValueError(
                f"log {path}: the log has {flag(name)} {shown(text)}, a Python file, and code "
                "that a log names is not run: if you trust the file, name it on the command "
                f"line: {shlex.quote(str(path))} {flag(name)} {shlex.quote(text)}"
            )


def _gpus_of_node(ranks: int) -> int:
    """Return the number of GPUs on a node, at most `_USUAL`, that divides ``ranks``."""
    return max(count for count in range(1, _USUAL + 1) if ranks % count == 0)


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _CALLED_DIFFERENT
    text = ", ".join(names[:_CALLED_DIFFERENT])
    return f"{text} and {more} more" if more > 0 else text
