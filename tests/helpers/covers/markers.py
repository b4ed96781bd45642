"""Evidence of tests: the ``covers`` marks of all tests that are collected and not skipped at night.

    @pytest.mark.covers("A", ("line", "v"), context_parallel_size=2, mtp_num_layers=1)

means: under zb-h1 and under V schedules this test trains with both of these settings, and compares
the result with Megatron's own schedule, bit for bit and with Megatron's own code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.covers.feature import Feature, Value
from tests.helpers.covers.vocabulary import (
    GRADES,
    KINDS,
    features_of_flags,
    has_a_stand_in,
    may_wait_for_a_gpu,
)

ROOT = Path(__file__).resolve().parents[3]
NIGHT = {"MEGATRON_EXT_NIGHTLY": "1"}
PLUGIN = "tests.helpers.covers.collecting"
OUTPUT = "MEGATRON_EXT_COVERS"  # environment variable that tells the plugin where to write


@dataclass(frozen=True)
class Shown:
    """Features that a ``test`` compares with Megatron's own schedule, all at once, under each of
    ``kinds`` of schedule.

    ``grade`` is A for Megatron's own code on the CPU, bit for bit; B if a kernel has a stand-in; C
    for a GPU test that has not run.
    """

    test: str
    grade: str
    kinds: tuple[str, ...]
    features: frozenset[Feature]


def read_mark(
    test: str, words: Sequence[Value], settings: Mapping[str, Value], *, needs_gpu: bool
) -> Shown:
    """Return the meaning of the mark ``covers(*words, **settings)`` of ``test``.

    Raises:
        ValueError: a grade, a kind of schedule or a setting is unknown, or the grade does not fit
            where the test runs.
    """
    try:
        grade, kinds = words
    except ValueError:
        raise ValueError(f"{test}: covers requires a grade and kinds of schedule") from None
    if grade not in GRADES:
        raise ValueError(f"{test}: grade {grade!r} is not one of {', '.join(GRADES)}")
    if isinstance(kinds, str) or not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"{test}: kinds of schedule {kinds!r} are not all among {KINDS}")
    if needs_gpu != (grade == "C"):
        raise ValueError(f"{test}: tests that need a GPU have grade C, and no other tests have it")
    try:
        shown = features_of_flags(settings)
    except ValueError as error:
        raise ValueError(f"{test}: {error}") from None
    if grade == "A" and (stood_in := sorted(filter(has_a_stand_in, shown))):
        raise ValueError(
            f"{test}: grade A is for tests of Megatron's own code, but {stood_in[0]} has only a "
            "stand-in here"
        )
    if needs_gpu:
        shown = frozenset(filter(may_wait_for_a_gpu, shown))
        if not shown:
            raise ValueError(
                f"{test}: grade C is for settings that only GPUs can show, and "
                f"{dict(settings)} has none"
            )
    return Shown(test, grade, tuple(kinds), shown)


def collect(tests: Sequence[str] = ("tests",)) -> list[Shown]:
    """Return all marks of the tests that pytest collects at night, without those of skipped tests.

    A GPU test counts although there is no GPU.

    Raises:
        ValueError: a mark is not understood.
        RuntimeError: pytest cannot collect.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "marks.json"
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", PLUGIN]
        done = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=ROOT,
            env={**os.environ, **NIGHT, OUTPUT: str(path)},
            capture_output=True,
            text=True,
        )
        if done.returncode or not path.exists():
            raise RuntimeError(f"pytest cannot collect the tests:\n{done.stdout}{done.stderr}")
        marks = json.loads(path.read_text())
    return [
        read_mark(mark["test"], mark["words"], mark["settings"], needs_gpu=mark["needs_gpu"])
        for mark in marks
        if mark["needs_gpu"] or not mark["is_skipped"]
    ]
