"""Tests of the helper that combines settings for tests: by day each pair or each value, at night
all combinations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.helpers import combinations
from tests.helpers.combinations import at_night, each_once, in_pairs

AXES = ("abcde", (1, 2, 3), (False, True), "xy")


def met(rows: Sequence[tuple[object, ...]], size: int) -> set[object]:
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), size)}


def test_by_day_any_two_values_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "IS_NIGHT", False)
    rows = in_pairs(*AXES)
    product = list(itertools.product(*AXES))
    assert met(rows, 2) == met(product, 2)
    assert len(rows) < len(product) / 3
    assert rows == in_pairs(*AXES)


def test_by_day_each_value_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "IS_NIGHT", False)
    rows = each_once(*AXES)
    assert len(rows) == 5
    assert met(rows, 1) == met(list(itertools.product(*AXES)), 1)
    assert at_night("a", "b") == ()


def test_at_night_everything_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "IS_NIGHT", True)
    for choose in (in_pairs, each_once):
        assert choose(*AXES) == list(itertools.product(*AXES))
    assert at_night("a", "b") == ("a", "b")
