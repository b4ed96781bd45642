"""Launch commands as users write them, split into the launcher, the script and its arguments.

Nothing is expanded and nothing is run. Two kinds of words before the launcher count: assignments of
variables, which the ranks get, and the words of known programs (`launchers`). Other words there are
ignored.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.base.errors import without_torch
from megatron_ext.base.secrets import is_shell_flag, masked
from megatron_ext.launch.command.launchers import (
    MODULE,
    OF_MODULES,
    Started,
    read_launchers,
    script_behind,
)
from megatron_ext.launch.command.log.log_figures import LogFigures
from megatron_ext.launch.command.shell_text import ShellWord, shell_commands
from megatron_ext.launch.script import refuse_flags_before_script

_TORCHRUN = ("torchrun", "ft_launcher")
_TORCHRUN_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "nvidia_resiliency_ext.fault_tolerance.launcher",
)
_PYTHON = re.compile(r"python[\d.]*")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_SHELLS = ("bash", "sh", "zsh", "source")
_PRINTERS = ("echo", "printf")
SHELL_SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
_TAKE_A_VALUE = ("-W", "-X")  # options of Python itself that take a value
_ECHO = (
    "give plan or doctor the log of an earlier start in place of the command, as in megatron-ext "
    "plan train.log; or write echo before the launcher (torchrun, python) in {}, run it, and paste "
    "what it prints"
)
# Flags that ft_launcher adds to torchrun's; each takes a value.
_OF_FT_LAUNCHER = re.compile(r"--(ft|fault[-_]tol|term|workers[-_]stop|restart)[-_].*")


@dataclass(frozen=True)
class BridgeRecipe:
    """Recipe of Megatron-Bridge, in place of a script.

    Attributes:
        config: the ConfigContainer that the recipe returns.
        fields: field of ``config`` for each of Megatron's arguments.
        settings: frozen weights and the vision tower, of which Megatron has no arguments.
    """

    config: Any
    fields: Mapping[str, str]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Launch:
    """Launch command as a user wrote it: script or module, its arguments, number of ranks.

    Attributes:
        world_size: number of ranks; None if the command does not say.
        installs: whether ``-m megatron_ext`` stands before the script; None if that is unknown,
            since the command begins at the script.
        max_restarts: how often the launcher restarts the ranks.
        environment: assignments of variables before the launcher.
        ignored: the words before the launcher that are ignored.
        log: the log of an earlier start that the launch was read from, if any; the script is then
            assumed.
        remarks: remarks on what was read from that log, and what is assumed.
        gpu: name of the GPU, if the log names it.
        figures: seconds and bytes that the log tells; None without a log.
        words: the whole command; () if it was read from a log or a recipe.
        recipe: the recipe in place of a script; None without one.
        rank_variable: variable in which the launcher tells a process its rank; "" for RANK, or
            without a launcher.
    """

    script: str
    is_module: bool
    arguments: tuple[str, ...]
    world_size: int | None = None
    installs: bool | None = None
    max_restarts: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    log: Path | None = None
    remarks: tuple[str, ...] = ()
    gpu: str | None = None
    figures: LogFigures | None = None
    words: tuple[str, ...] = ()
    recipe: BridgeRecipe | None = None
    rank_variable: str = ""


def read_launch(words: Sequence[str]) -> Launch:
    """Return the launch command in ``words``, as a user writes it.

    It is SCRIPT.py ARGS or -m MODULE ARGS, alone or after python, torchrun, python -m
    torch.distributed.run, ft_launcher, accelerate or deepspeed. Assignments, srun, mpirun, a
    container's command or ``bash -c`` may precede these. ``-m megatron_ext`` may stand before the
    script.

    Raises:
        ValueError: the words are no such command, torchrun refuses its own flags, or flags stand
            before the script.
    """
    if not words:
        raise ValueError("there is no launch command: write one, behind --")
    if len(words) == 1 and len(words[0].split()) > 1:
        raise ValueError("quotes make one word of the launch command: drop the quotes around it")
    launch = replace(_read_launch(words, Started()), words=tuple(words))
    for word in (launch.script, *launch.arguments[:1]):
        if word.startswith("$"):
            raise ValueError(
                f"{word} is a variable that only the shell can expand: {_ECHO.format('its script')}"
            )
    return launch


def _read_launch(words: Sequence[str], started: Started) -> Launch:
    """Return the launch command in ``words``.

    ``started`` tells what the programs before ``words`` start: ranks, nodes, variables.
    """
    match words:
        case [first, *rest] if _ASSIGNMENT.fullmatch(first):
            name, _, value = first.partition("=")
            launch = _read_launch(rest, started)
            return replace(launch, environment={name: value, **launch.environment})
        case [first, *rest] if Path(first).name in _TORCHRUN:
            return _read_torchrun(rest, started)
        case [first, *rest] if _PYTHON.fullmatch(Path(first).name):
            return _read_python(rest, started)
        case [option, module, *rest] if option in MODULE:
            return _read_module(module, rest, started)
        case [script, *rest] if script.endswith(".py"):
            return _launch_of(script, False, rest, started)
    return _read_behind(words, started)


def _read_behind(words: Sequence[str], started: Started) -> Launch:
    """Return the launch command in ``words``, which begin with other programs, such as srun."""
    if (at := shell_text_at(words)) is not None:
        return _read_text(words[:at], words[at], started)
    for index, word in enumerate(words):
        if index and _starts_ranks(word):
            break
        if (behind := script_behind(words[index:])) is not None:
            launch = _read_inside(words[: index + behind], words[index + behind :], started)
            return replace(launch, installs=bool(launch.installs))
    else:
        scripts = (i for i, word in enumerate(words) if word.endswith(".py"))
        index = next(scripts, 0)
    if not index:
        script = _shell_script(words)
        if script is not None:
            raise ValueError(
                f"{masked(words[:3])!r} starts a shell script, which is not executed to find the "
                f"launch command: {_ECHO.format(script)}"
            )
        raise ValueError(
            f"{masked(words[:3])!r} begins no launch command: begin with SCRIPT.py, -m MODULE, "
            "torchrun, srun or another launcher"
        )
    while index > 1 and _ASSIGNMENT.fullmatch(words[index - 1]):
        index -= 1
    return _read_inside(words[:index], words[index:], started)


def shell_text_at(words: Sequence[str]) -> int | None:
    """Return the index of the text that a shell runs, in which the launch of ``words`` stands.

    An example is ``srun bash -c TEXT``. None if the launch command stands in ``words`` themselves.
    """
    for index, word in enumerate(words):
        if index and is_shell_flag(words[index - 1]) and len(word.split()) > 1:
            return index
        if _starts_ranks(word) or script_behind(words[index:]) is not None:
            return None
    return None


def launch_in_text(text: str) -> tuple[ShellWord, ...]:
    """Return the launch command among the commands in a shell's ``text``.

    It is the longest of the commands that name Python, torchrun or a script, as a shell text may
    run other scripts too.

    Raises ValueError if the text is not understood.
    """
    commands = shell_commands(text)
    launches = [
        command
        for command in commands
        if command[0].text not in _PRINTERS
        and any(
            _starts_ranks(part) or part.endswith(".py")
            for word in command
            for part in word.text.split()  # a word may be the text of another shell
        )
    ]
    return max(launches or commands, key=len, default=())


def _starts_ranks(word: str) -> bool:
    """Return whether ``word`` is torchrun or Python."""
    name = Path(word).name
    return name in _TORCHRUN or _PYTHON.fullmatch(name) is not None


def _read_text(words: Sequence[str], text: str, started: Started) -> Launch:
    """Return the launch command in the ``text`` that a shell runs.

    ``words`` begin the command: other programs, the shell and its flags.
    """
    try:
        commands, chosen = shell_commands(text), launch_in_text(text)
    except ValueError as error:
        raise ValueError(f"the text behind {masked(words)} is not understood: {error}") from None
    is_shell = len(words) > 1 and Path(words[-2]).name in _SHELLS
    launch = _read_inside(words[: -1 - is_shell], [word.text for word in chosen], started)
    exported: dict[str, str] = {}
    ignored: list[str] = []
    for command in commands:
        first, *rest = (word.text for word in command)
        if command[0].begin < chosen[0].begin and first == "export":
            assignments = [word for word in rest if _ASSIGNMENT.fullmatch(word)]
            exported |= {name: value for name, _, value in (a.partition("=") for a in assignments)}
        elif command != chosen:
            ignored += (first, *rest)
    return replace(
        launch,
        environment={**exported, **launch.environment},
        ignored=(*launch.ignored, *ignored),
    )


def _read_inside(programs: Sequence[str], words: Sequence[str], started: Started) -> Launch:
    """Return the launch command in ``words``, which the ``programs`` before them run."""
    started = read_launchers(programs, started)
    launch = _read_launch(words, started)
    return replace(
        launch,
        environment={**started.environment, **launch.environment},
        ignored=(*started.ignored, *launch.ignored),
    )


def _shell_script(words: Sequence[str]) -> str | None:
    """Return the shell script that ``words`` run; None if they run none."""
    behind_shell = itertools.dropwhile(lambda word: Path(word).name not in _SHELLS, words)
    run = [word for word in itertools.islice(behind_shell, 1, None) if not word.startswith("-")]
    named = [word for word in words if Path(word).suffix in SHELL_SCRIPTS]
    return next(iter(run[:1] or named), None)


def _read_python(words: Sequence[str], started: Started) -> Launch:
    """Return the launch command in ``words`` after Python: its options, then a script or module."""
    match words:
        case [option, _, *rest] if option in _TAKE_A_VALUE:
            return _read_python(rest, started)
        case [option, *rest] if option.startswith("-") and option != "-m":
            return _read_python(rest, started)
    launch = _read_launch(words, started)
    return replace(launch, installs=bool(launch.installs))


def _read_module(module: str, rest: Sequence[str], started: Started) -> Launch:
    if module == "megatron_ext":
        refuse_flags_before_script(rest)
        return replace(_read_launch(rest, started), installs=True)
    if module in _TORCHRUN_MODULES:
        return _read_torchrun(rest, started)
    if module in OF_MODULES:
        return _read_launch([*OF_MODULES[module], *rest], started)
    return _launch_of(module, True, rest, started)


def _launch_of(script: str, is_module: bool, words: Sequence[str], started: Started) -> Launch:
    return Launch(
        script,
        is_module,
        tuple(words),
        world_size=started.processes,
        rank_variable=started.rank_variable,
    )


def _read_torchrun(words: Sequence[str], started: Started) -> Launch:
    try:
        from torch.distributed.run import get_args_parser, parse_min_max_nnodes
    except (ImportError, OSError) as error:  # an OSError: the package's libraries are not found
        raise without_torch("reading torchrun's flags", error) from error

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"torchrun does not accept its flags: {message}")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    for flag in {word.split("=")[0] for word in words if _OF_FT_LAUNCHER.fullmatch(word)}:
        parser.add_argument(flag)
    for action in parser._actions:
        if action.type is int:
            action.type = partial(_number, default=action.default)
    parsed = parser.parse_args(words)
    rest = [parsed.training_script, *parsed.training_script_args]
    launch = _read_launch(["-m", *rest] if parsed.module else rest, Started())
    launch = replace(launch, installs=bool(launch.installs), max_restarts=parsed.max_restarts)
    try:
        _, nodes = parse_min_max_nnodes(parsed.nnodes)
    # If the number of nodes is a shell variable, the number of torchrun processes that an outer
    # launcher starts is taken, one per node.
    except ValueError:
        nodes = started.processes or started.nodes
    # The number of processes may also be "gpu" or "auto" (as many as the node has GPUs), or a shell
    # variable.
    is_known = nodes is not None and parsed.nproc_per_node.isdecimal()
    return replace(launch, world_size=nodes * int(parsed.nproc_per_node) if is_known else None)


def _number(text: str, default: int | None) -> int | None:
    """Return the number in ``text``, or ``default`` for a variable that only the shell knows."""
    return default if "$" in text else int(text)
