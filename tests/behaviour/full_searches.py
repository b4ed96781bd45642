"""Makespans that searching families reach at full effort, with numba and without.

    python -m tests.behaviour.full_searches write|compare [--only WORDS]

The other records shorten searches so that the tests of the day can compare them. This one records
what users get, on some sixty problems. It takes about half an hour of one core, and numba. A change
of the search may improve an entry or, if the commit says why, make it worse.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest

from megatron_ext.search import best
from megatron_ext.search.effort import Effort, effort, small_effort
from tests.behaviour.inputs import run, write_inputs
from tests.behaviour.record import Record, differences, from_text, to_text

RECORD = Path(__file__).resolve().parents[1] / "records" / "full_searches.txt"

_EQUAL = "--costs f=10,i=12,w=8,comm=1"
_LATE_MESSAGES = "--costs f=10,i=12,w=8,comm=4"
_NO_MESSAGES = "--costs f=10,i=10,w=10,comm=0"
_SHORT_W = "--costs f=10,i=14,w=4,comm=2"
_OUTPUT_LAYER = "--costs f=10/10/10/13,i=12/12/12/15,w=8/8/8/11,comm=1"
PROBLEMS = (
    *(
        f"{family} --pp 4 -m {m} {_EQUAL}{limit}"
        for family in ("v-auto", "zb-auto", "loop-auto", "wave-auto")
        for m in (6, 8, 16)
        for limit in ("", " --memory-limit 0.5x", " --memory-limit 6")
        if (family, limit) != ("zb-auto", " --memory-limit 0.5x")
    ),
    *(
        f"{family} --pp 8 -m {m} {_EQUAL}{limit}"
        for family in ("v-auto", "loop-auto", "wave-auto")
        for m, limit in ((16, ""), (32, " --memory-limit 4"), (32, ""))
    ),
    *(f"zb-auto --pp 8 -m {m} {_EQUAL}" for m in (8, 16, 32)),
    *(f"v-auto --pp {p} -m {m} {_EQUAL}" for p, m in ((2, 8), (3, 7), (5, 12), (16, 32))),
    *(
        f"{family} --pp 4 -m 8 {costs}"
        for family in ("v-auto", "zb-auto", "loop-auto")
        for costs in (_LATE_MESSAGES, _NO_MESSAGES, _SHORT_W)
    ),
    f"zb-auto --pp 4 -m 12 {_OUTPUT_LAYER}",
    f"zb-auto --pp 4 -m 8 {_OUTPUT_LAYER} --post-validation",
    f"v-auto --pp 4 -m 8 {_EQUAL} --post-validation",
)
_EFFORTS: dict[str, Callable[[], Effort]] = {"numba": effort, "python": small_effort}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.behaviour.full_searches")
    parser.add_argument("what", choices=["write", "compare"])
    parser.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="run only problems whose names contain this text",
    )
    given = parser.parse_args()
    record: Record = {}
    for packer in _EFFORTS:
        for words in PROBLEMS:
            name = f"{words} ({packer})"
            if given.only in name:
                record[name] = _searched(words, packer)
                print(f"{name}: {record[name]}", flush=True)
    before = from_text(RECORD.read_text()) if RECORD.is_file() else {}
    if given.what == "write":
        RECORD.write_text(to_text(before | record if given.only else record))
        return 0
    texts = differences({name: text for name, text in before.items() if given.only in name}, record)
    print("\n".join(texts) or "no makespan differs")
    return int(bool(texts))


def _searched(words: str, packer: str) -> str:
    with _nothing_cached() as patch:
        patch.setattr(best, "effort", _EFFORTS[packer])
        said = run(f"simulate {words} --json", with_stderr=False)
    if not said.startswith("{"):
        return said.strip()
    report = json.loads(said)
    held = max(report["peak_activation_microbatches"])
    return f"makespan {report['makespan']:.9g}, step {report['step']:.9g}, holds {held:.9g}"


@contextmanager
def _nothing_cached() -> Iterator[pytest.MonkeyPatch]:
    """Change to an empty folder, without settings or stored searches of the user."""
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("COLUMNS", "100")
        patch.setenv("XDG_CACHE_HOME", str(Path(folder) / "cache"))
        for name in [name for name in os.environ if name.startswith("MEGATRON_EXT_")]:
            patch.delenv(name)
        write_inputs()
        yield patch


if __name__ == "__main__":
    sys.exit(main())
