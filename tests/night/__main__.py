"""Run a piece of the night, and write its lines into the record.

    python -m tests.night K/N                           the K-th of N pieces, 1/1 the whole night
    python -m tests.night tests/pipeline/test_a.py ...  these files

`scripts/test.sh --nightly K/N` calls this module, without lint and types, on all cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tests.night import record
from tests.night.pieces import COMMANDS, NIGHT, ROOT, night_cases, night_files, pieces_of
from tests.night.record import NightLine


def main(words: Sequence[str]) -> int:
    piece = piece_of(words)
    if not piece:
        print(f"{' '.join(words)}: neither a piece nor files of the night\n{__doc__}")
        return 2
    files = [name for name in piece if name not in COMMANDS]
    lines = run_files(files)
    record.write(lines)
    for name in (name for name in piece if name in COMMANDS):
        lines.append(run_command(name))
        record.write(lines[-1:])
    cases = dict.fromkeys(piece, 1) | night_cases(files)
    wrong = record.problems({line.name: line for line in lines}, cases)
    print(f"night: {len(lines)} lines written to {record.RECORD.name}")
    for text in wrong:
        print(f"night: {text}")
    return bool(wrong)


def piece_of(words: Sequence[str]) -> list[str]:
    """Return the files and commands that ``words`` name, or an empty list if they name none."""
    files = night_files()
    if words and set(words) <= {*files, *COMMANDS}:
        return list(words)
    number, _, pieces = " ".join(words).partition("/")
    if not (number.isdecimal() and pieces.isdecimal() and 1 <= int(number) <= int(pieces)):
        return []
    known = {name: float(line.seconds) for name, line in record.read_committed().items()}
    return pieces_of(files, known, int(pieces))[int(number) - 1]


def run_files(files: Sequence[str], *, workers: str = "auto") -> list[NightLine]:
    """Run all tests of ``files`` as at night, one file on each worker."""
    if not files:
        return []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", *files, "-n", workers, "--maxprocesses", "4"),
                *("--dist", "loadfile", "--no-loadscope-reorder", "-rfE", "--durations", "20"),
                *("-o", "junit_family=xunit1", "--junit-xml", str(results)),
            ],
            cwd=ROOT,
            env={**os.environ, NIGHT: "1"},
        )
        return lines_of(results.read_text(), files, commit())


def lines_of(results: str, files: Sequence[str], at: str) -> list[NightLine]:
    """Return a line for each of ``files`` from pytest's ``results`` in XML. A file without any
    result has failed."""
    seconds, passed, failed = defaultdict[str, float](float), Counter[str](), Counter[str]()
    skipped = defaultdict[str, Counter[str]](Counter)
    for case in ElementTree.fromstring(results).iter("testcase"):
        name = case.get("file") or f"{case.get('name', '').replace('.', '/')}.py"
        seconds[name] += float(case.get("time", "0"))
        if case.find("failure") is not None or case.find("error") is not None:
            failed[name] += 1
        elif (skip := case.find("skipped")) is not None:
            reason = " ".join(skip.get("message", "").split())
            skipped[name][reason.replace("|", "/").replace(";", ",")] += 1
        else:
            passed[name] += 1
    return [
        NightLine(
            name,
            at,
            round(seconds[name]),
            passed[name],
            failed[name] or int(not (passed[name] or skipped[name])),
            skipped[name],
        )
        for name in files
    ]


def run_command(name: str) -> NightLine:
    print(f"== python -m {name}", flush=True)
    begin = time.monotonic()
    status = subprocess.run([sys.executable, "-m", *name.split()], cwd=ROOT).returncode
    took, failed = round(time.monotonic() - begin), int(bool(status))
    return NightLine(name, commit(), took, passed=1 - failed, failed=failed, skipped={})


def commit() -> str:
    """Return the abbreviated hash of the checkout, with ``+`` if files differ from it."""
    told = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    return subprocess.run(told, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "?"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
