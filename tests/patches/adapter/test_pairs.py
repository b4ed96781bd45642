"""Tests of overlapped forward and backward passes: schedules that may have them, and settings that
are refused with them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

import torch
from megatron.core import parallel_state

from megatron_ext.adapter.arguments import check_features
from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.features import requested_options
from megatron_ext.adapter.pairs import callers
from megatron_ext.adapter.pairs.callers import refuse_unplanned, takes_plans
from megatron_ext.adapter.pairs.overlap_setting import SETTING
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.problem import Offload, ScheduleOptions
from tests.helpers.accepting import accepts


def asking(schedule: str, **more: Any) -> Any:
    chunks = choose(schedule).place(2).chunks
    return SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        transformer_impl="local",
        **{SETTING: True},
        **more,
    )


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb", "zb-v", "dualpipe-v"])
def test_schedules_with_two_stages_on_a_rank_take_them(schedule: str) -> None:
    assert accepts(refuse, asking(schedule, delay_wgrad_compute=True), choose(schedule))
    assert not accepts(refuse, asking(schedule, cpu_offloading=True), choose(schedule))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_line_says_which_schedules_have_pairs(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"choose interleaved, interleaved-zb, zb-v or dualpipe"):
        refuse(asking(schedule), choose(schedule))


def test_another_extra_is_refused_by_its_flag() -> None:
    flags = r"^--overlap-moe-\S+ does not go with --pipeline-activation-offload: "
    with pytest.raises(ValueError, match=flags):
        refuse(asking("zb-v"), choose("zb-v"), ScheduleOptions(activation_offload=Offload.FULL))


def test_packed_sequences_are_refused() -> None:
    """Overlapped passes are refused for packed sequences. Megatron's forward step gives its
    schedule plan no cu_seqlens, so tokens would attend to other sequences."""
    with pytest.raises(ValueError, match="ends of packed sequences"):
        refuse(asking("zb-v", sft=True), choose("zb-v"))


def test_a_file_with_pairs_needs_the_flag() -> None:
    settings = asking("zb-v")
    resolved = replace(choose("zb-v"), has_pairs=True)
    refuse(settings, resolved)
    setattr(settings, SETTING, False)
    with pytest.raises(ValueError, match="overlaps forward and backward passes: add --overlap-moe"):
        refuse(settings, resolved)


def test_a_step_of_one_microbatch_has_none() -> None:
    """A step of one microbatch runs without overlapped passes. A caller's batch may fill only one
    microbatch, and such a step used to be refused in the middle of a training."""
    settings = asking("zb-v")
    ours = PipelineConfig(schedule="zb-v")
    assert requested_options(ours, settings, 2) == {"pairs": True}
    assert requested_options(ours, settings, 1) == {}
    # At a launch, when the number of microbatches is unknown, the flag alone counts.
    assert requested_options(ours, settings) == {"pairs": True}


def test_passes_that_run_as_one_are_not_measured() -> None:
    measuring = PipelineConfig.parse(schedule="zb-v", costs="profile")
    with pytest.raises(ValueError, match="cannot be told apart; write --pipeline-costs e"):
        check_features(asking("zb-v"), measuring)


class Planned(torch.nn.Linear):
    def build_schedule_plan(self) -> None: ...


@pytest.mark.parametrize(
    ("model", "initialized", "says"),
    [
        (torch.nn.Linear(1, 1), True, "needs a model with the method build_schedule_plan"),
        (Planned(1, 1).requires_grad_(False), True, "frozen parameters, such as weight"),
        (Planned(1, 1), False, "the caller has process groups of its own"),
    ],
)
def test_what_has_no_plans_is_refused(
    model: torch.nn.Module, initialized: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: initialized)
    call: Any = SimpleNamespace(models=[model])
    with pytest.raises(ValueError, match=says):
        refuse_unplanned(call)


def plain(data: Any, model: Any) -> None: ...
def planning(data: Any, model: Any, return_schedule_plan: bool = False) -> None: ...
def passing_on(*args: Any, **kwargs: Any) -> None: ...


def test_a_forward_step_that_makes_no_plan_is_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    callers._say_that_nothing_hides.cache_clear()
    assert takes_plans(planning) and takes_plans(passing_on)
    assert not capsys.readouterr().out
    assert not takes_plans(plain) and not takes_plans(plain)
    (line,) = capsys.readouterr().out.splitlines()
    assert "hides nothing: plain takes no return_schedule_plan" in line
