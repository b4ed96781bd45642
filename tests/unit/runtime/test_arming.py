"""Tests of when the optimizer steps before post-validation of its gradients has ended."""

from __future__ import annotations

import pytest

from megatron_ext.features.post_validation.runtime.arming import WINDOW, History


def history(steps: str) -> History:
    """Return a history in which ``.`` is a quiet step and ``x`` one that was clipped or skipped."""
    known = History()
    for step in steps:
        known = known.then(step == ".")
    return known


@pytest.mark.parametrize("steps", ["..", "x..", "..x", "........", "..x..x..", "x.x.x..."])
def test_armed_where_fewer_than_half_were_bad(steps: str) -> None:
    assert history(steps).is_armed


@pytest.mark.parametrize("steps", ["", ".", "x", ".x", "xx", ".x.x", "x.x.x.x."])
def test_not_armed_at_the_start_and_while_clips_are_frequent(steps: str) -> None:
    assert not history(steps).is_armed


def test_what_is_long_past_is_forgotten() -> None:
    assert not history("xxxxxx..").is_armed
    assert history("xxxxxx" + "." * WINDOW) == history("." * WINDOW)
    assert history("xxxx" + "." * (WINDOW - 3)).bad == 3
    assert history("xxxx" + "." * (WINDOW - 3)).is_armed


def test_a_clip_every_third_step_does_not_disarm() -> None:
    assert all(history("..x" * 4 + rest).is_armed for rest in ("", ".", ".."))
