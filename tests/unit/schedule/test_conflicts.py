"""Tests of options that exclude one another: each conflict is declared once, for settings and
problems alike."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from megatron_ext.compile.feature_settings import setting_of
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.problem import (
    CONFLICTS,
    P2P,
    Conflict,
    Offload,
    Problem,
    Recompute,
    ScheduleOptions,
    VocabularyParallel,
)
from megatron_ext.schedule.slices import Slices

OTHERS = ScheduleOptions(
    p2p=P2P.BATCHED,
    vocab_parallel=VocabularyParallel.ONE,
    activation_offload=Offload.FULL,
    recompute=Recompute(first=1),
    steps_overlap=True,
    slices=Slices(3),
    pairs=True,
)


def _only(*names: str) -> ScheduleOptions:
    return ScheduleOptions(**{name: getattr(OTHERS, name) for name in names})


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: " and ".join(conflict.options))
def test_a_problem_names_both_options_and_the_reason(conflict: Conflict) -> None:
    placement = choose("zb-v").place(2)
    costs = parse_costs("f=1,i=1,w=1,d2h=1", placement)
    phrases = [_only(name).phrase(name) for name in conflict.options]
    text = f"{phrases[0]} does not go with {phrases[1]}: {conflict.why}; drop one"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        Problem(placement, 4, costs, options=_only(*conflict.options))
    for name in conflict.options:
        Problem(placement, 4, costs, options=_only(name))


@pytest.mark.parametrize(
    "conflict",
    [conflict for conflict in CONFLICTS if "pairs" not in conflict.options],
    ids=lambda conflict: " and ".join(conflict.options),
)
def test_settings_name_both_flags_and_the_reason(conflict: Conflict) -> None:
    first, second = map(setting_of, conflict.options)
    given = {setting_of(name): _written(name) for name in conflict.options}
    text = f"{flag(first)}.* does not go with {flag(second)}.*: {re.escape(conflict.why)}; drop one"
    with pytest.raises(ValueError, match=f"^{text}$"):
        PipelineConfig.parse(schedule="zb-v", **given)
    for name in conflict.options:
        setting = {setting_of(name): given[setting_of(name)]}
        assert PipelineConfig.parse(schedule="zb-v", **setting).options == _only(name)


def _written(name: str) -> str | bool:
    value = getattr(OTHERS, name)
    return value if isinstance(value, bool) else str(value.count if name == "slices" else value)


def test_each_option_has_a_phrase_with_its_value() -> None:
    phrases = [OTHERS.phrase(option.name) for option in fields(ScheduleOptions)]
    assert phrases == [
        "p2p batched",
        "vocabulary parallelism 1",
        "offload full",
        "recompute first:1",
        "post-validation",
        "division into 3 slices",
        "pairing of passes",
    ]
