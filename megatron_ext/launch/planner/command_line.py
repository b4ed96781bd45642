"""A launch with flags added and removed, ready to be pasted.

What is pasted must run as it stands: quoted for a shell, without secrets, and with ``-m
megatron_ext`` if nothing else brings our flags along.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from megatron_ext.base.secrets import masked
from megatron_ext.base.text_file import LARGEST_SCRIPT
from megatron_ext.config import PipelineConfig, flag, is_on_stock
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.command.our_flags import IMPORTS_US
from megatron_ext.launch.script import without
from megatron_ext.planner.verdict import Written
from megatron_ext.written_settings import says

_OURS = {flag(setting.name) for setting in fields(PipelineConfig)}
# Flags that a plan's recommendation sets; values of an earlier recommendation are dropped from the
# command.
_CHOSEN = (
    *("schedule", "memory_limit", "vocab_parallel", "activation_offload", "recompute"),
    *("slices", "slice_lengths", "join_slice_weights", "post_validation"),
)

# Flags that act only on a schedule of megatron_ext; they are dropped together with
# --pipeline-schedule.
_FOR_A_SCHEDULE = tuple(
    flag(setting.name) for setting in fields(PipelineConfig) if not is_on_stock(setting)
)


def command_with(launch: Launch, written: Written) -> str:
    """Return the command of ``launch`` with the changes ``written``, as one line for a shell.

    For a Megatron-Bridge recipe, lines of Python are returned. Secrets are masked. ``-m
    megatron_ext`` is added before the script if flags of ours need it and nothing else brings it.
    """
    if launch.recipe is not None:
        from megatron_ext.launch.planner.recipe_changes import RecipeChanges

        return RecipeChanges(launch.recipe, written, arguments_with(launch, written)).text()
    words = launch.words or (launch.script, *launch.arguments)
    is_ours = any(word in _OURS for word in written.words)
    return masked(_rewritten(words, launch, written, is_ours and not _is_installed(launch)))


def _rewritten(words: Sequence[str], launch: Launch, written: Written, installs: bool) -> list[str]:
    count = len(words) - len(launch.arguments)
    # The words of the launch are within a text for a shell: bash -c 'COMMAND'.
    if tuple(words[count:]) != launch.arguments:
        at = next(i for i in range(1, len(words)) if words[i - 1] in ("-c", "-lc"))
        inner = _rewritten(shlex.split(words[at]), launch, written, installs)
        return [*words[:at], masked(inner), *words[at + 1 :]]
    launcher = list(words[:count])
    if installs:
        at = count - (2 if launch.is_module else 1)
        launcher[at:at] = ("-m", "megatron_ext")
    return [*launcher, *arguments_with(launch, written)]


def arguments_with(launch: Launch, written: Written) -> tuple[str, ...]:
    """Return the words after the script of ``launch``, with the changes ``written``."""
    gone = {*written.dropped, *(word for word in written.words if word.startswith("--"))}
    if written.added or written.dropped:
        gone |= set(map(flag, _CHOSEN))
    words = (*without(launch.arguments, tuple(gone)), *written.words)
    if says(words, "schedule") or says(words, "race"):
        return words
    return tuple(without(words, _FOR_A_SCHEDULE))


def _is_installed(launch: Launch) -> bool:
    """Return whether the command or its script loads megatron_ext already."""
    if launch.installs and launch.words:
        return True
    script = text_of_script(launch)
    return script is not None and IMPORTS_US.search(script) is not None


def text_of_script(launch: Launch) -> str | None:
    """Return the text of the script or module of ``launch``; None if it cannot be read here."""
    path = Path(launch.script)
    if launch.is_module:
        path = Path(*launch.script.split(".")).with_suffix(".py")
    try:
        with path.open() as file:
            return file.read(LARGEST_SCRIPT)
    except (OSError, UnicodeDecodeError):
        return None
