"""Rewriting of launch commands: to record, to write a checkpoint, to run without our flags.

A command stays unchanged up to its script; there `megatron-ext parity record` is inserted between
the launcher and the script, so that each rank records under any launcher.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

from megatron_ext.config import PipelineConfig, flag, variable
from megatron_ext.launch.command.launch_words import Launch, read_launch, shell_text_at
from megatron_ext.launch.command.shell_text import shell_commands

# Settings that keep a comparison from writing to the user's own logs and projects.
_QUIET = ("--tensorboard-dir", "", "--wandb-project", "")
# Characters that shells expand: a command with any of them cannot be split and rejoined.
_SHELL = "$`;&|<>*?("


@dataclass(frozen=True)
class RunCommand:
    """Launch command of a run to record, split into its parts.

    Attributes:
        launcher: words before the script, without ``-m megatron_ext``.
        script: the script, as ``SCRIPT.py`` or ``-m MODULE``.
        arguments: arguments of the script.
        shell: words around the command, such as ``bash -c``; empty if there are none.
    """

    launcher: tuple[str, ...]
    script: tuple[str, ...]
    arguments: tuple[str, ...]
    shell: tuple[str, ...] = ()

    def words(self, before_script: Sequence[str], more: Sequence[str] = ()) -> list[str]:
        """Return the words of the command with some inserted and some added.

        Args:
            before_script: words to insert before the script.
            more: arguments to add after all others, so that they take precedence.
        """
        words = [*self.launcher, *before_script, *self.script, *self.arguments, *more]
        return [*self.shell, shlex.join(words)] if self.shell else words

    def value(self, name: str) -> str | None:
        """Return the value of the flag ``name`` in the command; None if it is not there.

        If the flag is repeated, the last value counts, as for Megatron's parser.
        """
        found = None
        for word, following in pairwise((*self.arguments, "")):
            if word == name:
                found = following
            elif word.startswith(f"{name}="):
                found = word.partition("=")[2]
        return found


def read_run_command(words: Sequence[str]) -> RunCommand:
    """Split the launch command ``words`` into its parts.

    All forms that ``megatron-ext doctor`` accepts are accepted.

    Raises:
        ValueError: the words are no launch command, or a shell would have to expand them.
    """
    place = shell_text_at(words)
    if place is None:
        return _split(words, read_launch(words))
    word = words[place]
    if set(word) & set(_SHELL) or len(shell_commands(word)) != 1:
        raise ValueError(
            f"the command in {' '.join(words[max(0, place - 2) : place])} is for a shell "
            f"({sorted(set(word) & set(_SHELL))}): put megatron-ext parity record DIR -- "
            "before the launcher inside it for each of the two commands, then compare the "
            "recordings by megatron-ext parity compare"
        )
    (inner,) = shell_commands(word)
    return replace(read_run_command([word.text for word in inner]), shell=tuple(words[:place]))


def _split(words: Sequence[str], launch: Launch) -> RunCommand:
    launcher = list(words[: len(words) - len(launch.arguments) - 1])
    if launch.is_module:
        launcher.pop()  # drops the -m before the module's name
    if launch.installs:
        place = len(launcher) - 1 - launcher[::-1].index("megatron_ext")
        del launcher[place - 1 : place + 1]
    script = ("-m", launch.script) if launch.is_module else (launch.script,)
    return RunCommand(tuple(launcher), script, launch.arguments)


def recorded(
    command: RunCommand,
    folder: Path,
    iterations: int,
    more: Sequence[str] = (),
    *,
    is_reversed: bool = False,
) -> list[str]:
    """Return the words that run ``command`` with all ranks recording their numbers.

    Args:
        folder: folder for the recording.
        iterations: number of iterations to run and record.
        more: further arguments of the script.
        is_reversed: whether each step runs its microbatches in reverse order.
    """
    record = ["-m", "megatron_ext", "parity", "record", str(folder)]
    record += ["--iterations", str(iterations), *["--reversed"] * is_reversed, "--"]
    if not command.launcher:
        record = ["python", *record]
    return command.words(record, more)


def record_here(command: RunCommand) -> list[str] | None:
    """Return the script and its arguments if this process is a rank; None if it starts ranks.

    A command without a launcher makes this process a rank.
    """
    return None if command.launcher or command.shell else command.words(())


def quiet(more: Sequence[str] = ()) -> list[str]:
    """Return ``more`` arguments of a recorded run, with those that switch its logs off."""
    return [*more, *_QUIET]


def saving(command: RunCommand, folder: Path) -> list[str]:
    """Return the words that run ``command`` for one iteration and write a checkpoint.

    The checkpoint can be loaded with any distribution of layers to ranks.

    Args:
        folder: folder for the checkpoint.
    """
    launcher = ["-m", "megatron_ext"] if command.launcher else ["python", "-m", "megatron_ext"]
    save = ["--save", str(folder), "--save-interval", "1", "--exit-interval", "1"]
    formats = ["--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable"]
    return command.words(launcher, quiet([*save, *formats]))


def as_stock(command: RunCommand) -> RunCommand:
    """Return ``command`` without flags and variables of ours, so that stock Megatron runs."""
    switches = {flag(f.name) for f in fields(PipelineConfig) if f.default is False}
    flags = {flag(f.name) for f in fields(PipelineConfig)}
    kept: list[str] = []
    words = iter(command.arguments)
    for word in words:
        if word.split("=")[0] not in flags:
            kept.append(word)
        elif "=" not in word and word not in switches:
            next(words, None)
    ours = [f"{variable(f.name)}=" for f in fields(PipelineConfig)]
    launcher = tuple(word for word in command.launcher if not any(map(word.startswith, ours)))
    return replace(command, launcher=launcher, arguments=tuple(kept))
