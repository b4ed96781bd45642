"""Tests a sample of tests/records: today's texts and programs equal the recorded ones.

The whole record is compared by ``python -m tests.behaviour compare tests/records``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.record import Record, differences, from_text, taken, to_text, workplace

RECORDS = Path(__file__).resolve().parents[2] / "records"
ANEW = "where that is meant, write it anew: python -m tests.behaviour write tests/records"

# By subject: the number n if this file compares every n-th entry of the record.
EVERY = {"programs": 25, "help": 1, "outputs": 2, "refusals": 25, "files": 5, "names": 2}
# Entries that need Megatron, take seconds, or change with the library that formats them.
ELSEWHERE = ("doctor", "megatron-ext", "plan", "simulate 1f1b --pp 4")


@pytest.mark.parametrize("subject", EVERY)
def test_a_sample_is_as_it_was_written(subject: str) -> None:
    # Megatron is imported here, in the one process that runs this test, and not in all processes
    # that collect tests.
    from tests.behaviour.subjects import SUBJECTS

    assert EVERY.keys() == SUBJECTS.keys()
    written = from_text((RECORDS / f"{subject}.txt").read_text())
    with workplace():
        entries = SUBJECTS[subject]()
        names = [name for name in sorted(entries) if not name.startswith(ELSEWHERE)]
        sample = names[:: EVERY[subject]]
        now = taken({name: entries[name] for name in sample})
    assert sample
    assert sorted(entries) == sorted(written), f"other entries than in the record; {ANEW}"
    changes = differences({name: written[name] for name in sample}, now)
    assert not changes, "\n\n".join([*changes, ANEW])


def test_a_record_is_read_as_it_was_written() -> None:
    record: Record = {"b": "one line", "a": "two\n\n  lines", "c": ""}
    assert from_text(to_text(record)) == record
    assert to_text(record).startswith("a\n    two\n\n      lines\nb\n")


def test_what_differs_is_said_in_words() -> None:
    before, now = {"a": "x\ny", "b": "1", "d": ""}, {"a": "x\nz", "c": "2", "d": ""}
    assert differences(before, now) == [
        "b: is no longer there",
        "c: is new",
        "a: is not the same\nwas: y\nnow: z",
    ]
