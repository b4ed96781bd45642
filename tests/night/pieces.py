"""Files and commands of a night, and how they are distributed over its pieces."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
NIGHT = "MEGATRON_EXT_NIGHTLY"

# Commands that run in the last pieces of the night, after all test files.
COMMANDS = (
    "tests.faults",
    "tests.stream_faults",
    "tests.behaviour compare tests/records",
    "tests.behaviour.full_searches compare",
)
UNKNOWN_SECONDS = 60  # assumed seconds of a file that is not in the record

_COMBINATIONS = "tests.helpers.combinations"
_IN_COMBINATIONS = {"IS_NIGHT", "at_night", "nightly", "in_pairs", "each_once"}


def night_files() -> list[str]:
    """Return the test files that read whether it is night, by path from the repository's root.

    GPU tests have a suite of their own.
    """
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        if not name.startswith("tests/gpu/") and _reads_night(file.read_text()):
            found.append(name)
    return found


@functools.cache
def _reads_night(source: str) -> bool:
    return _COMBINATIONS in source and any(
        isinstance(node, ast.ImportFrom)
        and node.module == _COMBINATIONS
        and _IN_COMBINATIONS & {alias.name for alias in node.names}
        for node in ast.walk(ast.parse(source))
    )


def night_cases(files: Sequence[str]) -> Counter[str]:
    """Return the number of cases that each of ``files`` has at night, as pytest collects them."""
    if not files:
        return Counter()
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env={**os.environ, NIGHT: "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    return Counter(re.findall(r"^(\S+\.py)::", ended.stdout, re.MULTILINE))


def deal(seconds: Mapping[str, float], pieces: int) -> list[list[str]]:
    """Distribute names over ``pieces`` lists whose ``seconds`` add up to about the same, and return
    the lists. The name with the most seconds comes first, and each goes to the list with the
    fewest."""
    dealt: list[list[str]] = [[] for _ in range(pieces)]
    taken = [0.0] * pieces
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        least = taken.index(min(taken))
        dealt[least].append(name)
        taken[least] += seconds[name]
    return dealt


def pieces_of(files: Iterable[str], known: Mapping[str, float], pieces: int) -> list[list[str]]:
    """Return the pieces of a night: those with files, then one for each of `COMMANDS` if there are
    more pieces than commands. Otherwise files and commands are distributed together."""
    seconds = {name: known.get(name, UNKNOWN_SECONDS) for name in files}
    alone = len(COMMANDS)
    if pieces <= alone:
        return deal(seconds | {name: known.get(name, 600.0) for name in COMMANDS}, pieces)
    return [*deal(seconds, pieces - alone), *([name] for name in COMMANDS)]
