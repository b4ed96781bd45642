"""A launch with flags added and removed, ready to be pasted.

What is pasted must run as it stands: quoted for a shell, without secrets, and with ``-m
megatron_ext`` if nothing else brings our flags along.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from megatron_ext.base.secrets import masked
from megatron_ext.base.text_file import LARGEST_SCRIPT
from megatron_ext.config import PipelineConfig, flag, is_on_stock
from megatron_ext.launch.command.launch_words import Launch, launch_in_text, shell_text_at
from megatron_ext.launch.command.our_flags import IMPORTS_US
from megatron_ext.launch.script import left_without, without
from megatron_ext.planner.verdict import Written
from megatron_ext.written_settings import says

_OURS = {flag(setting.name) for setting in fields(PipelineConfig)}
# Flags that a plan's recommendation sets; values of an earlier recommendation are dropped from the
# command.
_CHOSEN = (
    *("schedule", "memory_limit", "vocab_parallel", "activation_offload", "recompute"),
    *("slices", "slice_lengths", "join_slice_weights", "post_validation"),
)

# Pattern of the blanks at the end of a text, and of the backslashes with which its lines go on.
_BLANKS_AT_END = re.compile(r"(?:[ \t]|\\\n)*\Z")

# Flags that act only on a schedule of megatron_ext. If --pipeline-schedule is dropped from a
# command, these flags are dropped too.
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
    if launch.words and (at := shell_text_at(words)) is not None:
        text = _rewritten_text(words[at], launch, written, installs)
        return [*words[:at], text, *words[at + 1 :]]
    count = len(words) - len(launch.arguments)
    launcher = list(words[:count])
    if installs:
        at = count - (2 if launch.is_module else 1)
        launcher[at:at] = ("-m", "megatron_ext")
    return [*launcher, *arguments_with(launch, written)]


def _rewritten_text(text: str, launch: Launch, written: Written, installs: bool) -> str:
    """Return the ``text`` of a shell with the launch in it changed, and all else as it stands."""
    words = launch_in_text(text)
    if (at := shell_text_at([word.text for word in words])) is not None:  # a shell in a shell
        word = words[at]
        inner = _rewritten_text(word.text, launch, written, installs)
        return text[: word.begin] + shlex.quote(inner) + text[word.end :]
    count = len(words) - len(launch.arguments)
    script = words[count - (2 if launch.is_module else 1)]
    gone, added = _changes(launch, written)
    left = left_without([word.text for word in words[count:]], gone)
    dropped = [word for at, word in enumerate(words[count:]) if at not in left]
    edits = [(word.begin, word.end, "") for word in dropped]
    edits.append((words[-1].end, words[-1].end, "".join(f" {shlex.quote(word)}" for word in added)))
    if installs:
        edits.append((script.begin, script.begin, "-m megatron_ext "))
    for begin, end, replacement in sorted(edits, reverse=True):
        before = text[:begin]
        if begin < end:
            before = before[: len(before) - len(_BLANKS_AT_END.search(before)[0])]  # type: ignore[index]
        text = before + replacement + text[end:]
    return text


def arguments_with(launch: Launch, written: Written) -> tuple[str, ...]:
    """Return the words after the script of ``launch``, with the changes ``written``."""
    gone, added = _changes(launch, written)
    return (*without(launch.arguments, gone), *added)


def _changes(launch: Launch, written: Written) -> tuple[Sequence[str], Sequence[str]]:
    """Return the flags to remove from the arguments of ``launch``, and the words to add to them."""
    gone = {*written.dropped, *(word for word in written.words if word.startswith("--"))}
    if written.added or written.dropped:
        gone |= set(map(flag, _CHOSEN))
    words = (*without(launch.arguments, tuple(gone)), *written.words)
    if says(words, "schedule") or says(words, "race"):
        return tuple(gone), written.words
    return (*gone, *_FOR_A_SCHEDULE), without(written.words, _FOR_A_SCHEDULE)


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
