"""Tests that an option of schedules has one name: in flags, variables and keywords of a training,
and in the commands."""

from __future__ import annotations

from dataclasses import fields

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.feature_settings import setting_of
from megatron_ext.config import OVERLAP, SCHEDULE_SETTINGS, PipelineConfig, flag
from megatron_ext.schedule.problem import ScheduleOptions

# Options of schedules with other names in the commands than in a training.
EXCEPTIONS = {"pairs": OVERLAP, "steps_overlap": "--post-validation"}
# Options of simulate that belong to the whole problem and not to a schedule.
_OTHERS = {"--costs", "--memory-limit", "--rank-speeds"}


def options_of(command: str) -> dict[str, str]:
    params = get_command(app).commands[command].params  # type: ignore[attr-defined]
    return {one.opts[0]: one.help for one in params if one.param_type_name == "option"}


def test_simulate_has_the_options_of_schedules_and_few_others() -> None:
    ours = {flag(name).replace("--pipeline-", "--") for name in SCHEDULE_SETTINGS} | {OVERLAP}
    given = options_of("simulate")
    assert given.keys() >= ours | _OTHERS
    others = given.keys() - ours - _OTHERS
    assert len(others) <= 14, others


def test_every_option_of_a_schedule_is_declared_once() -> None:
    declared = {setting.name: setting.metadata["help"] for setting in fields(PipelineConfig)}
    for option in fields(ScheduleOptions):
        name = setting_of(option.name)
        if option.name in EXCEPTIONS:
            assert EXCEPTIONS[option.name] in options_of("simulate")
        else:
            assert name == option.name and name in SCHEDULE_SETTINGS
    for name in {*SCHEDULE_SETTINGS, "memory_limit", "rank_speeds"}:
        help_text = options_of("simulate")[flag(name).replace("--pipeline-", "--")]
        assert help_text == declared[name].replace("--pipeline-", "--")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--p2p", "slow"), "--p2p slow: write async or batched"),
        (("--recompute", "all"), "--recompute all: write none, fit"),
        (("--slices", "0"), "--slices 0: write a number from 1 on"),
        (
            ("--activation-offload", "fit"),
            "--activation-offload fit copies as many activations",
        ),
        (("--recompute", "fit"), "and there is none: add --memory-limit"),
        (
            ("--slices", "2", "--vocab-parallel", "1"),
            "--slices 2 does not go with --vocab",
        ),
        (("--memory-limit", "much"), "--memory-limit: memory limit 'much'"),
        (("--offload", "full"), "--offload"),
        (("--trace", "x.json"), "--trace"),
    ],
)
def test_a_mistake_names_the_option_of_the_command(words: tuple[str, ...], text: str) -> None:
    """A refusal of `simulate` names the option as the command spells it. `simulate` used to have
    checks of its own, whose errors had other words."""
    ended = CliRunner().invoke(app, ["simulate", "1f1b", "--pp", "2", "-m", "4", *words])
    assert ended.exit_code == 2 and text in " ".join(ended.output.split()), ended.output
