"""Run night files that are chosen by a commit's hash, after the tests of the day. `.ci/run` calls
it.

    python -m tests.night.drawn SECONDS     seconds since .ci/run began

No machine runs the whole night for this project. Instead each change runs a part of it, once a
whole night has been recorded. Only files that passed in the recorded night are chosen, and nothing
is recorded. Files that need sources which are on no package index, and not here, are named instead.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.helpers.fetched import FETCHED, MEGATRON_LM
from tests.helpers.nemo_rl_checkout import CHECKOUT
from tests.night import record
from tests.night.__main__ import commit, run_files
from tests.night.pieces import COMMANDS, ROOT, night_cases, night_files
from tests.night.record import NightLine

# Most seconds that the drawn files may take on all cores, according to the night's record.
AT_MOST = 25 * 60.0
LATEST = 65 * 60.0  # seconds after the start of .ci/run by which the last file must begin

# Folder of sources that a test file needs, by the name that the file imports.
SOURCES: dict[str, Path] = {
    "megatron_sources": MEGATRON_LM,
    "optimizers_on_cpu": FETCHED / "emerging-optimizers",
    "nemo_rl_checkout": CHECKOUT,
}


def main(words: Sequence[str]) -> int:
    begin = time.monotonic() - float(words[0])
    cores = os.cpu_count() or 1
    lines, green, files = record.read(), {}, night_files()
    if missing := set(files) - lines.keys():
        print(f"== no part of the night: {len(missing)} of {len(files)} files are not recorded yet")
        return 0
    cases = night_cases(files)
    for name, line in lines.items():
        if name in COMMANDS or record.problems({name: line}, {name: cases[name]}):
            continue
        if absent := lacking((ROOT / name).read_text(), SOURCES):
            print(f"== {name} is left out: there is no {absent.relative_to(ROOT)}")
            continue
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


def lacking(text: str, sources: Mapping[str, Path]) -> Path | None:
    """Return a folder of ``sources`` that does not exist and whose name is in the ``text`` of a
    test file; None if there is none."""
    for word, folder in sources.items():
        if re.search(rf"\b{word}\b", text) and not folder.exists():
            return folder
    return None


def drawn(seconds: Mapping[str, float], by: str, at_most: float) -> Iterator[str]:
    """Yield names in a random order, given by the hash ``by``, as long as their ``seconds`` add up
    to at most ``at_most``."""
    total = 0.0
    for name in sorted(seconds, key=lambda name: hashlib.sha256(f"{by} {name}".encode()).digest()):
        total += seconds[name]
        if total > at_most:
            return
        yield name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
