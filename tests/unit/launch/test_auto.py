"""Tests of settings in environment variables, and of `megatron_ext.auto`, which installs them when
it is imported."""

from __future__ import annotations

import importlib
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import megatron_ext
from megatron_ext.config import ALLOW_UNKNOWN, PipelineConfig, flag, variable
from megatron_ext.patches.engine import applied
from megatron_ext.written_settings import from_argv, from_environment

# Values that Python code gives to `install`, with the text that a flag has.
NUMBERS_AND_PATHS: dict[str, tuple[Any, str]] = {
    "memory_limit": (5, "5"),
    "vocab_parallel": (1, "1"),
    "slices": (2, "2"),
    "trace": (Path("traces"), "traces"),
}
VALUES = {
    "schedule": "zb-h1",
    "memory_limit": "0.5x",
    "rank_speeds": "1,0.5",
    "microbatch_order": "small-ends",
    "p2p": "async",
    "trace_iters": "1:3",
    "vocab_parallel": "2",
    "activation_offload": "half",
    "recompute": "first:2",
    "slices": "1",  # more slices conflict with vocabulary parallelism and with post-validation
    "slice_lengths": "even",
    "race": "zb-2p",
    "race_then": "report",
    "shared_prompts": "exact",
}


@pytest.mark.parametrize(
    "without",
    [
        {"post_validation", "recompute", "shared_prompts"},
        {"vocab_parallel", "activation_offload", "race", "race_then", "recompute"},
        {"post_validation", "activation_offload", "race", "race_then"},
    ],
)
def test_every_setting_has_a_variable(without: set[str]) -> None:
    """Every setting has an environment variable with the meaning of its flag. Each case sets all
    settings that go together."""
    env, argv = {ALLOW_UNKNOWN: "1", "MEGATRON_CORE": "x"}, []
    for setting in fields(PipelineConfig):
        # join_slice_weights requires several slices
        if setting.name in without | {"join_slice_weights"}:
            continue
        is_switch = setting.default is False
        value = "1" if is_switch else VALUES.get(setting.name, "any")
        env[variable(setting.name)] = value
        argv += [flag(setting.name)] if is_switch else [flag(setting.name), value]
    assert from_environment(env) == from_argv(argv)


def test_an_empty_variable_and_a_switch_that_is_off_change_nothing() -> None:
    env = {
        "MEGATRON_EXT_SCHEDULE": "zb-h1",
        "MEGATRON_EXT_COSTS": "",
        "MEGATRON_EXT_REPORT_SPLIT": "0",
    }
    assert from_environment(env) == PipelineConfig("zb-h1")


def test_a_schedule_is_not_needed_to_watch_megatrons_own() -> None:
    assert from_environment({"MEGATRON_EXT_TRACE": "folder"}).watches_stock


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({}, "MEGATRON_EXT_SCHEDULE is not set: export MEGATRON_EXT_SCHEDULE=zb-h1"),
        ({"SCHEDULE": ""}, "MEGATRON_EXT_SCHEDULE is not set"),
        ({"MEMORY_LIMIT": "0.5x"}, "MEGATRON_EXT_SCHEDULE is not set"),
        ({"SCHEDULE": "zb-h3"}, r"MEGATRON_EXT_X\): there is no schedule 'zb-h3'; did you mean"),
        (
            {"SCHEDULE": "zb-h1", "MEMORY_LIMITS": "0.5x"},
            r"MEGATRON_EXT_MEMORY_LIMITS is not a setting: did you mean MEGATRON_EXT_M",
        ),
        ({"SHEDULE": "zb-h1"}, r"SHEDULE is not a setting: did you mean MEGATRON_EXT_SCHEDULE\?"),
        (
            {"SCHEDULE": "zb-h1", "WHAT_NO_SETTING_RESEMBLES": "red"},
            "_RESEMBLES is not a setting: write one of .*MEGATRON_EXT_MEMORY_LIMIT,",
        ),
        # The name MEGATRON_EXT_NOTHING used to be taken for a misspelt MEGATRON_EXT_COSTS, because
        # of their common prefix.
        (
            {"SCHEDULE": "zb-h1", "NOTHING": "1"},
            "MEGATRON_EXT_NOTHING is not a setting: write one of",
        ),
        (
            {"SCHEDULE": "zb-h1", "P2P": "sync"},
            r"MEGATRON_EXT_X\): --pipeline-p2p sync: write",
        ),
        (
            {"SCHEDULE": "zb-h1", "REPORT_SPLIT": "yes"},
            "MEGATRON_EXT_REPORT_SPLIT=yes: write 1, or 0",
        ),
    ],
)
def test_a_mistake_is_named_and_nothing_is_installed(
    env: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for setting in fields(PipelineConfig):
        monkeypatch.delenv(variable(setting.name), raising=False)
    for name, value in env.items():
        monkeypatch.setenv(f"MEGATRON_EXT_{name}", value)
    with pytest.raises(ValueError, match=text):
        importlib.import_module("megatron_ext.auto")
    assert "megatron_ext.auto" not in sys.modules and not applied()


@pytest.mark.parametrize("name", NUMBERS_AND_PATHS)
def test_a_number_or_a_path_is_the_same_as_its_text(name: str) -> None:
    """`install` accepts a number or a path as it accepts its text. `install(memory_limit=5)`
    used to end with an AttributeError, and `install(vocab_parallel=1)` with the advice to write
    1."""
    value, text = NUMBERS_AND_PATHS[name]
    given = PipelineConfig.parse(schedule="zb-v", **{name: value})
    assert given == PipelineConfig.parse(schedule="zb-v", **{name: text})
    assert given != PipelineConfig.parse(schedule="zb-v")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"post_validation": "false"}, "--pipeline-post-validation: 'false' .* True or False"),
        ({"post_validation": 1}, "--pipeline-post-validation: 1 .* True or False"),
        ({"slices": True}, "--pipeline-slices: True is no value .*: write K as text"),
        (
            {"rank_speeds": [1, 0.5]},
            r"--pipeline-rank-speeds: \[1, 0.5\] .*: write S,S,",
        ),
    ],
)
def test_a_value_of_another_type_is_refused(given: dict[str, Any], text: str) -> None:
    """`install` refuses a value of a wrong type. `install(post_validation="false")` used to switch
    post-validation on."""
    with pytest.raises(ValueError, match=text):
        megatron_ext.install("zb-h1", **given)
    assert not applied()
