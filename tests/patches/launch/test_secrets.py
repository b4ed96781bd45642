"""Tests that secrets are masked in outputs, and that no flag of Megatron's is mistaken for one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megatron_ext.adapter.parity.result_recorder import plain_arguments
from megatron_ext.base.secrets import masked
from megatron_ext.cli import app
from megatron_ext.launch.command import megatron_arguments
from tests.helpers.megatron_runs import SCRIPT, model_flags


def test_no_flag_of_megatrons_is_masked() -> None:
    """No flag of Megatron's is masked as a secret: --tokenizer-model, --kv-channels and
    --fim-prefix-token only contain words such as token and key."""
    parser = megatron_arguments.parser()
    flags = [*parser._option_string_actions]
    assert len(flags) > 800
    for flag in flags:
        assert masked([flag, "value", f"{flag}=value"]) == f"{flag} value {flag}=value"
    values = {action.dest: "value" for action in parser._actions}
    assert plain_arguments(SimpleNamespace(**values)) == values
    secret = plain_arguments(SimpleNamespace(lr=0.1, wandb_api_key="hidden"))
    assert secret == {"lr": 0.1, "wandb_api_key": "$WANDB_API_KEY"}


@pytest.mark.parametrize("before", ["srun --export=ALL,HF_TOKEN=hidden", "HF_TOKEN=hidden"])
def test_doctor_shows_no_secret(before: str) -> None:
    words = [*before.split(), "python", str(SCRIPT), *model_flags(global_batch_size=8)]
    ended = CliRunner().invoke(app, ["doctor", "--json", "--", *words, "--api-key", "hidden"])
    assert json.loads(ended.output)["findings"] and "hidden" not in ended.output
