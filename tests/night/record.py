"""Record of the last night: a line for each file and command, with the results of its tests.

Tests that do not run are soon out of date. A night takes hours, and each change runs a small part
of it. The record says at which commit each file was last run, and a test of the day compares it
with the tests.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.skips import is_allowed_at_night

RECORD = Path(__file__).parents[1] / "records" / "night.txt"
HEADER = """\
# The last night of each file: `scripts/test.sh --nightly K/N` writes the lines of what it runs.
# name | commit | seconds | passed | failed | skipped, by reason
"""


@dataclass(frozen=True)
class NightLine:
    """Result of a file's tests, or of a command, in a night.

    Attributes:
        name: path of the file from the repository's root, or words after ``python -m``.
        commit: abbreviated hash; ends in ``+`` if the tree had changes.
        seconds: seconds that the tests took, one after the other.
        passed, failed: number of cases, errors counted as failed.
        skipped: number of cases by reason.
    """

    name: str
    commit: str
    seconds: int
    passed: int
    failed: int
    skipped: Mapping[str, int]

    @property
    def cases(self) -> int:
        return self.passed + self.failed + sum(self.skipped.values())

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        figures = (self.name, self.commit, self.seconds, self.passed, self.failed, reasons)
        return " | ".join(map(str, figures)).rstrip()


def parse(text: str) -> NightLine:
    name, commit, seconds, passed, failed, reasons = (part.strip() for part in text.split("|"))
    skipped = {}
    for reason in filter(None, reasons.split("; ")):
        count, _, why = reason.partition(" ")
        skipped[why] = int(count)
    return NightLine(name, commit, int(seconds), int(passed), int(failed), skipped)


def read(path: Path = RECORD) -> dict[str, NightLine]:
    """Return the lines of the record by name; empty if there is no record."""
    return _parsed(path.read_text() if path.exists() else "")


def read_committed() -> dict[str, NightLine]:
    """Return the lines of the record as of the checkout's commit. Pieces that run one after the
    other write lines, and the distribution of later pieces must not depend on these."""
    told = ["git", "show", f"HEAD:./{RECORD.name}"]
    ended = subprocess.run(told, cwd=RECORD.parent, capture_output=True, text=True)
    return _parsed(ended.stdout)


def _parsed(text: str) -> dict[str, NightLine]:
    lines = [parse(line) for line in text.splitlines() if line and not line.startswith("#")]
    return {line.name: line for line in lines}


def write(lines: Iterable[NightLine], path: Path = RECORD) -> None:
    """Write ``lines`` into the record, in place of those with the same names."""
    known = read(path) | {line.name: line for line in lines}
    path.write_text(HEADER + "".join(f"{known[name]}\n" for name in sorted(known)))


def problems(lines: Mapping[str, NightLine], cases: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the recorded ``lines``, given the number of ``cases`` that each
    file has at night."""
    wrong = [f"{name}: no line" for name in cases.keys() - lines.keys()]
    wrong += [f"{name}: a line, and no night cases" for name in lines.keys() - cases.keys()]
    for name in lines.keys() & cases.keys():
        line = lines[name]
        if line.failed:
            wrong.append(f"{name}: {line.failed} failed at {line.commit}")
        if line.cases < cases[name]:
            wrong.append(f"{name}: {line.cases} cases at {line.commit}, {cases[name]} now")
        wrong += [
            f"{name}: skipped, {reason}"
            for reason in line.skipped
            if not is_allowed_at_night(reason)
        ]
    return sorted(wrong)
