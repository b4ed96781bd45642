"""The JOB of ``plan`` and ``doctor``: a launch command behind ``--``, or one word in its place.

A job is known from a command, a log, a recipe, a file or sizes, and with an option for each a user
could give several. One word, whose form says what it is, cannot conflict with another.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megatron_ext.base.secrets import masked
from megatron_ext.commands.command_help import CliCommand
from megatron_ext.config import OVERLAP
from megatron_ext.written_settings import given_and_others, ours_and_others

if TYPE_CHECKING:
    from megatron_ext.launch.command.launch_words import Launch


class JobKind(enum.StrEnum):
    """Kinds of jobs. All but the last are launches, whose arguments of Megatron tell the model."""

    COMMAND = "launch command"
    RECIPE = "recipe"
    ARGUMENTS = "file of arguments"
    LOG = "log"
    SIZES = "sizes"


@dataclass(frozen=True)
class JobArgument:
    """Job that a command is to plan or check.

    Attributes:
        kind: kind of the job.
        word: word of the command line that names the job; "" for a launch command.
        words: words of the launch command; for another job, our flags behind its word.
    """

    kind: JobKind
    word: str
    words: tuple[str, ...] = ()


JobWord = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB | -- COMMAND",
        help="Job: a launch command behind --, or one word in its place. The word is the log of an "
        "earlier start, a .json file with an object of Megatron's arguments, or MODULE:FUNCTION, a "
        "function that returns a Megatron-Bridge config as Bridge's recipes do. plan also takes "
        "sizes: those of the pipeline, as pp=8,m=64, and those of a model. Flags --pipeline-... "
        "may follow the word.",
    ),
]

_RECIPE = re.compile(r"[A-Za-z_][\w.]*:\w*")
_SIZES = re.compile(r"[a-z-]+=")
_FLAGS, _COMMAND = "flags of ours", "launch command"  # keys in the meta of a typer context


class JobCommand(CliCommand):
    """Command that takes a JOB.

    Flags of ours and the words of a launch command are set aside before typer parses the rest, so
    that a mistake in the rest is still found.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse ``args`` without the words that are set aside, which `job_of` reads."""
        before, command = args, None
        if "--" in args:
            at = args.index("--")
            before, command = args[:at], args[at + 1 :]
        flags, others = ours_and_others(before, (OVERLAP,))
        ctx.meta[_FLAGS], ctx.meta[_COMMAND] = flags, command
        if command is None and (program := self._program_in(ctx, others)) is not None:
            ctx.fail(f"{program} begins a launch command: write -- before it")
        return super().parse_args(ctx, others)

    def _program_in(self, ctx: Any, words: list[str]) -> str | None:
        """Return the word that begins a launch command among ``words``; None if none does. An
        option that is none of ours follows such a word."""
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            for name in param.opts
        }
        program, previous = None, ""
        for word in words:
            if word.startswith("-"):
                if program is not None and word.partition("=")[0] not in takes_value:
                    return program
            elif program is None and not takes_value.get(previous):
                if _is_of_a_job(word):
                    return None
                program = word
            previous = word
        return None


def _is_of_a_job(word: str) -> bool:
    """Return whether ``word`` stands for a job, and begins no launch command.

    A file is a log, whatever its name, unless a launch command could begin with it.
    """
    is_written_as_one = _SIZES.match(word) or _RECIPE.fullmatch(word)
    is_log = os.path.isfile(word) and not word.endswith((".py", ".sh"))
    return bool(is_written_as_one or is_log) or word.endswith(
        (".json", ".log", ".out", ".err", ".txt")
    )


def job_of(context: typer.Context, word: str | None) -> JobArgument | None:
    """Return the job that a user named for a `JobCommand`; None without one.

    Args:
        word: the word of the job, as typer has parsed it; None without one.

    Raises:
        ValueError: the words name several jobs, or are no job (`parse_job`).
    """
    words = [] if word is None else [word, *context.args]
    return parse_job(words, context.meta[_FLAGS], context.meta[_COMMAND])


def flags_outside(context: typer.Context) -> tuple[str, ...]:
    """Return our flags among the words of a `JobCommand`, without those in a launch command."""
    return tuple(context.meta[_FLAGS])


def parse_job(
    words: Sequence[str], flags: Sequence[str], command: Sequence[str] | None
) -> JobArgument | None:
    """Return the job that the words of a command line describe; None if they describe none.

    Args:
        words: words that are no options.
        flags: flags of ours.
        command: words behind ``--``, a launch command; None without ``--``.

    Raises:
        ValueError: the words describe several jobs, or flags of ours stand before ``--``.
    """
    if len(words) > 1:
        raise ValueError(
            f"{masked(words[:3])}: a job is one word, such as the path of a log; write -- before "
            "a launch command"
        )
    if command is not None:
        if words:
            raise ValueError(
                f"{words[0]} and the launch command behind -- are two jobs: give only one of the "
                f"two; --pipeline-... flags for {words[0]} follow it without --"
            )
        if flags:
            raise ValueError(
                f"{flags[0]} stands before --: write --pipeline-... flags into the launch "
                "command, behind its script"
            )
        if not command:
            raise ValueError("-- is followed by nothing: write a launch command behind --")
        return JobArgument(JobKind.COMMAND, "", tuple(command))
    if not words:
        return None
    (word,) = words
    return JobArgument(_kind(word), word, tuple(flags))


def _kind(word: str) -> JobKind:
    if word.endswith((".py", ".sh")):
        raise ValueError(f"{word} begins a launch command: write -- before {word}")
    if word.endswith(".json"):
        return JobKind.ARGUMENTS
    if Path(word).is_file():  # a log may be called lr=3e-4.log
        return JobKind.LOG
    if _SIZES.match(word):
        return JobKind.SIZES
    return JobKind.RECIPE if _RECIPE.fullmatch(word) else JobKind.LOG


def launch_of(job: JobArgument) -> Launch:
    """Return the launch that ``job`` describes. The job must not be one of sizes.

    Raises:
        ValueError: the command, the log, the recipe or the file is not understood.
        PatchError: Megatron, which knows its flags, is not installed.
    """
    assert job.kind is not JobKind.SIZES
    if job.kind is JobKind.COMMAND:
        from megatron_ext.launch.command.launch_words import read_launch

        return read_launch(job.words)
    if job.kind is JobKind.RECIPE:
        from megatron_ext.launch.command.bridge_recipe import launch_from_recipe

        return launch_from_recipe(job.word, job.words)
    if job.kind is JobKind.ARGUMENTS:
        from megatron_ext.launch.command.arguments_file import launch_from_arguments

        return launch_from_arguments(Path(job.word), job.words)
    from megatron_ext.launch.command.log.megatron_log import launch_from_log

    settings, others = given_and_others(job.words)
    if others:
        raise ValueError(
            f"{others[0]}: behind a training's log only --pipeline-... flags are accepted, since "
            f"Megatron's own arguments are read from the log; drop {others[0]}"
        )
    return launch_from_log(Path(job.word), settings)
