"""The ``covers`` marks of tests that train through Megatron's flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from megatron_ext.compile.registry import choose
from tests.helpers.covers.vocabulary import OTHER_NAMES, SETTINGS

_KNOWN = {setting.name for setting in SETTINGS} | set(OTHER_NAMES)
_KINDS = {"line": "line", "loop": "loop", "v": "v", "wave": "v"}


def kinds(schedules: Sequence[str]) -> tuple[str, ...]:
    """Return the kinds of those ``schedules`` that split the backward."""
    chosen = [choose(schedule) for schedule in schedules]
    named = (
        _KINDS[resolved.example.name] for resolved in chosen if resolved.traits.splits_backward
    )
    return tuple(dict.fromkeys(named))


def covers(
    grade: str, schedules: Sequence[str], flags: Mapping[str, Any], **more: Any
) -> list[pytest.MarkDecorator]:
    """Return the marks of a training with ``flags`` through the launcher; ``flags`` are as in
    `model_flags`.

    Flags that no recipe has are ignored. ``more`` are settings that are on without a flag. The list
    is empty if no schedule splits the backward.
    """
    of = kinds(schedules)
    if not of:
        return []
    settings = {name: value for name, value in flags.items() if name in _KNOWN}
    settings["precision"] = next((name for name in ("bf16", "fp16") if flags.get(name)), "fp32")
    # This check is on by default, except with dynamic loss scales, whose gradients may be NaN.
    settings["check_for_nan_in_grad"] = settings["precision"] != "fp16"
    if flags.get("grad_reduce_in_bf16"):
        settings["grad_reduce_in_fp32"] = False
    if not flags.get("untie_embeddings_and_output_weights"):
        settings["untie_embeddings_and_output_weights"] = False
    return [pytest.mark.covers(grade, of, **settings | more)]
