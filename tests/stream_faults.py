"""Faults that the cases on emulated streams must find: each of this project's waits is removed in
turn.

python -m tests.stream_faults                # all of them: some six minutes on two cores
python -m tests.stream_faults copies.py      # faults with this text in their names
python -m tests.stream_faults --list

A wait that no case needs is either needless or listed in `UNSEEN` with a reason. The exit code is 0
only if every other fault was found, that is, a rank of one of the cases has reported something.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator

import pytest

from tests.helpers.streams.cases import AT_NIGHT, CASES
from tests.helpers.streams.faults import HOST_WAITS, Edit, sites
from tests.helpers.streams.findings import FOUND

_OFFLOAD = "megatron_ext/features/offload/runtime/offload.py"

# Waits whose removal no trace shows, by the name of the site: why none shows it, and what would.
UNSEEN: dict[str, str] = {
    f"{_OFFLOAD} OffloadedStep.abandon: transfer.wait()": (
        "a step that has failed, whose caller goes on: its activations live as long as its error, "
        "and die after what a test allocates next; a caller that trains on after an error shows it"
    ),
}

# Former faults that were not mended by a wait. The edits of each bring the fault back, and a case
# must find it.
MENDED: dict[str, tuple[Edit, ...]] = {
    # The router's saved indices belong to no living tensor. If they were dropped while they were
    # being copied back from the host, the next pass got their memory, and the copy overwrote it.
    "storages that no tensor refers to": (
        Edit(
            _OFFLOAD, "_Storages.take_exclusive", "                alive\n                and ", ""
        ),
        Edit(
            _OFFLOAD,
            "OffloadedStep._copy_back",
            "_Coming(action, away.storages, transfer)",
            "_Coming(action, [], transfer)",
        ),
    ),
}


def seen() -> dict[str, contextlib.AbstractContextManager[None]]:
    """Return, by name, the faults that a case must find, as contexts to be entered once."""
    faults = {str(site): site.taken_out() for site in sites() if str(site) not in UNSEEN}
    return faults | {name: _all_made(edits) for name, edits in MENDED.items()}


@contextlib.contextmanager
def _all_made(edits: tuple[Edit, ...]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit.made())
        yield


def found_by(fault: contextlib.AbstractContextManager[None]) -> str:
    """Return the first case that finds something under ``fault``, or an empty text."""
    with fault:
        for name, case in (CASES | AT_NIGHT).items():
            try:
                case.run_emulated()
            # A case is skipped if it needs Transformer Engine, which cannot be fetched.
            except pytest.skip.Exception:
                continue
            except AssertionError as error:
                if FOUND in str(error):
                    return name
    return ""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Discard everything that ranks print."""
    sys.stdout.flush()
    saved = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stream_faults")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="seed only faults whose names contain this text"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the names of the faults, and seed none"
    )
    options = parser.parse_args(arguments)
    chosen = {
        name: fault
        for name, fault in seen().items()
        if not options.names or any(part in name for part in options.names)
    }
    if options.list:
        print(*chosen, sep="\n")
        return 0
    missed = []
    for number, (name, fault) in enumerate(chosen.items(), start=1):
        print(f"{number}/{len(chosen)} {name} ... ", end="", flush=True)
        start = time.monotonic()
        with _silence():
            by = found_by(fault)
        print(f"{by or 'NOT FOUND'} ({time.monotonic() - start:.0f} s)", flush=True)
        if not by:
            missed.append(name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are found")
    print(
        f"{len(UNSEEN)} of {len(sites())} waits no case can show, and {len(HOST_WAITS)} are hosts'"
    )
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
