"""Sources of patched functions: their digests, and a readable report of an unknown one.

A patch replaces a function that somebody read. A digest of the source tells whether it is still the
same function, whatever the version is called; if not, the user gets the command that shows the
difference, and can allow it by name.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config import ALLOW_UNKNOWN

_ENTRY = re.compile(r"[\w.]+:[\w.]+@\w+")
_UPSTREAM = "NVIDIA/Megatron-LM"
# Commit of Megatron whose sources stand for a version that is not released yet.
UNTAGGED = {"0.20": "d98e8a64"}


@dataclass(frozen=True)
class UnknownSource:
    """Source of a function of Megatron's that a patch was not read against.

    Attributes:
        digest: `source_digest` of the source.
        known_of: versions whose sources the patch was read against.
        we: how the patch uses the function, and why.
        file, lines: its file, first and last line; "" if there is no file.
        diff: command that shows the changes since the nearest known version; "" if none is known.
    """

    target: str
    digest: str
    known_of: str
    we: str
    file: str
    lines: tuple[int, int]
    diff: str

    @property
    def entry(self) -> str:
        """Entry in the environment variable `ALLOW_UNKNOWN` that allows this source."""
        return f"{self.target}@{self.digest}"

    def __str__(self) -> str:
        first, last = self.lines
        where = f"{self.file}, lines {first} to {last}" if self.file else "no file can be read"
        lines = [f"{self.target} is not as in {self.known_of}", f"    {self.we}", f"    {where}"]
        return "\n".join([*lines, f"    what has changed: {self.diff}"] if self.diff else lines)


def source_digest(original: Any) -> str:
    """Return 12 hex digits over the source of ``original``, without comments and layout."""
    source = textwrap.dedent(inspect.getsource(original))
    # Dedent fails on sources in which a string literal begins at the margin.
    if source[0].isspace():
        source = "if True:\n" + source
    return hashlib.sha256(ast.unparse(ast.parse(source)).encode()).hexdigest()[:12]


def is_allowed(target: str, digest: str) -> bool:
    """Return whether the user allows this source of ``target``, by `ALLOW_UNKNOWN`.

    Raises:
        ValueError: the variable cannot be parsed.
    """
    return f"{target}@{digest}" in _allowed(os.environ.get(ALLOW_UNKNOWN, ""))


def allowance(unknown: list[UnknownSource]) -> str:
    """Return a value of the variable `ALLOW_UNKNOWN` that allows ``unknown`` sources too.

    Sources of other targets that the variable allows now stay allowed.
    """
    allowed = _allowed(os.environ.get(ALLOW_UNKNOWN, ""))
    targets = {source.target for source in unknown}
    kept = [entry for entry in allowed if entry.partition("@")[0] not in targets]
    return ",".join((*kept, *dict.fromkeys(source.entry for source in unknown)))


@functools.cache
def _allowed(text: str) -> tuple[str, ...]:
    entries = tuple(filter(None, map(str.strip, text.split(","))))
    for entry in entries:
        if not _ENTRY.fullmatch(entry):
            raise ValueError(
                f"{ALLOW_UNKNOWN}: {entry!r} is not TARGET@DIGEST; 'megatron-ext doctor' prints "
                "the entry to write for each source that it does not know"
            )
    return entries


def versions_of(known: Mapping[str, str]) -> list[str]:
    """Return the versions in the keys of ``known`` digests, oldest first.

    A key is ``0.19`` or ``0.18, 0.19``; ``0.20@2a75ac1`` is a commit before that version, which
    callers pin.
    """
    versions = {version.partition("@")[0] for key in known for version in key.split(", ")}
    return sorted(versions, key=lambda version: [int(part) for part in version.split(".")])


def unknown_source(
    target: str, original: Any, digest: str, known: Mapping[str, str], we: str
) -> UnknownSource:
    """Return a report on the source of ``original``, whose ``digest`` is not ``known``."""
    versions = versions_of(known)
    package = re.split("[.:]", target)[0]
    known_of = f"{package} {' and '.join(versions)}"
    try:
        file = inspect.getsourcefile(inspect.unwrap(original)) or ""
        text, first = inspect.getsourcelines(original)
    except (OSError, TypeError):
        return UnknownSource(target, digest, known_of, we, "", (0, 0), "")
    lines = first, first + len(text) - 1
    diff = _diff(package, Path(file), versions) if package == "megatron" else ""
    return UnknownSource(target, digest, known_of, we, file, lines, diff)


def _diff(package: str, file: Path, versions: list[str]) -> str:
    """Return the command that compares ``file`` with the nearest known version of upstream.

    Return "" if the file is not in the package.
    """
    if package not in file.parts:
        return ""
    depth = file.parts[::-1].index(package)
    root, path = file.parents[depth], Path(*file.parts[-depth - 1 :])
    here = sys.modules[f"{package}.core"].__version__
    version = next((known for known in versions if here.startswith(f"{known}.")), versions[-1])
    tag = UNTAGGED.get(version, f"core_v{version}.0")
    if (root / ".git").exists():
        return f"git -C {root} diff {tag} -- {path}"
    return f"git show {tag}:{path} | git diff --no-index - {file} (in a clone of {_UPSTREAM})"
