"""A record of the entries of a subject, as text whose diff shows what has changed."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.short_search import shorten_search

# Functions by entry of the record. Each returns the entry's text, and is called in a `workplace`.
Subject = Mapping[str, Callable[[], str]]
Record = dict[str, str]

_INDENT = "    "
_LONG = 5_000  # long lines are shortened only in entries with more characters
_WIDE = 100


@contextlib.contextmanager
def workplace() -> Iterator[None]:
    """Change to an empty folder, with terminals 100 columns wide, without caches of the user and
    with short searches of v-auto, so that outputs do not depend on the machine."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("COLUMNS", "100")
        patch.setenv("XDG_CACHE_HOME", str(Path(folder) / "cache"))
        for name in [name for name in os.environ if name.startswith("MEGATRON_EXT_")]:
            patch.delenv(name)
        shorten_search(patch)
        yield


def taken(subject: Subject) -> Record:
    """Return the current texts of the entries of ``subject``."""
    return {name: _shortened(say()) for name, say in subject.items()}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shortened(text: str) -> str:
    """Return ``text`` without blanks at line ends. In a long text, long lines are replaced by their
    beginning and a digest, so that a diff shows which have changed."""
    lines = [line.rstrip() for line in text.splitlines()]
    if len(text) > _LONG:
        lines = [
            line if len(line) <= _WIDE else f"{line[:60]} ... {digest(line)[:8]}" for line in lines
        ]
    return "\n".join(lines).strip("\n")


def to_text(record: Record) -> str:
    """Return the entries by name, each with its text indented below it."""
    lines = []
    for name, text in sorted(record.items()):
        lines += [name, *(f"{_INDENT}{line}".rstrip() for line in text.splitlines())]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Record:
    """Return the record in ``text``, which `to_text` has written."""
    entries: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith(_INDENT):
            entries[line] = lines = []
        else:
            lines.append(line.removeprefix(_INDENT))
    return {name: "\n".join(lines) for name, lines in entries.items()}


def differences(before: Record, now: Record) -> list[str]:
    """Return the differences, with one text for each entry that has changed."""
    texts = [f"{name}: is no longer there" for name in sorted(before.keys() - now.keys())]
    texts += [f"{name}: is new" for name in sorted(now.keys() - before.keys())]
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            changes = [
                f"{'was' if line[0] == '-' else 'now'}: {line[2:]}"
                for line in difflib.ndiff(before[name].splitlines(), now[name].splitlines())
                if line[0] in "-+"
            ]
            texts.append("\n".join([f"{name}: is not the same", *changes]))
    return texts
