"""Run night files that are chosen by a commit's hash, after the tests of the day. `.ci/run` calls
it.

    python -m tests.night.drawn SECONDS     seconds since .ci/run began

No machine runs the whole night for this project. Instead each change runs a part of it, once a
whole night has been recorded. Only files that passed in the recorded night are chosen, and nothing
is recorded.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.night import record
from tests.night.__main__ import commit, run_files
from tests.night.pieces import COMMANDS, night_cases, night_files
from tests.night.record import NightLine

AT_MOST = 25 * 60.0  # seconds on all cores, by the record
LATEST = 65 * 60.0  # seconds after the begin of .ci/run by which the last file must begin


def main(words: Sequence[str]) -> int:
    begin = time.monotonic() - float(words[0])
    cores = os.cpu_count() or 1
    lines, green, files = record.read(), {}, night_files()
    if missing := set(files) - lines.keys():
        print(f"== no part of the night: {len(missing)} of {len(files)} files are not recorded yet")
        return 0
    cases = night_cases(files)
    for name, line in lines.items():
        if name not in COMMANDS and not record.problems({name: line}, {name: cases[name]}):
            green[name] = float(line.seconds)
    names = list(drawn(green, commit(), AT_MOST * cores))
    print(f"== {len(names)} of {len(lines)} files of the night", flush=True)

    def run(name: str) -> list[NightLine]:
        return run_files([name], workers="0") if time.monotonic() - begin < LATEST else []

    with ThreadPoolExecutor(cores) as pool:
        ran = {line.name: line for lines in pool.map(run, names) for line in lines}
    wrong = record.problems(ran, {name: cases[name] for name in ran})
    print("\n".join(f"night: {text}" for text in wrong), end="\n" if wrong else "")
    return bool(wrong)


def drawn(seconds: Mapping[str, float], by: str, at_most: float) -> Iterator[str]:
    """Yield the names of ``seconds`` in a random order given by the hash ``by``, until their
    seconds add up to ``at_most``."""
    total = 0.0
    for name in sorted(seconds, key=lambda name: hashlib.sha256(f"{by} {name}".encode()).digest()):
        total += seconds[name]
        if total > at_most:
            return
        yield name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
