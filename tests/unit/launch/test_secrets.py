"""Tests that commands contain no secrets when they are shown or stored, and can still be pasted."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_ext.base.secrets import masked, without_secrets
from megatron_ext.commands import output
from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.planner.command_line import command_with
from megatron_ext.planner.verdict import Written

COMMANDS = {
    "WANDB_API_KEY=hidden torchrun x.py": "WANDB_API_KEY=$WANDB_API_KEY torchrun x.py",
    "env HF_TOKEN='a hidden b' python x.py": "env HF_TOKEN=$HF_TOKEN python x.py",
    "x.py --hf-token hidden --lr 1": "x.py --hf-token $HF_TOKEN --lr 1",
    "x.py --wandb.api_key=hidden --lr 1": "x.py --wandb.api_key=$WANDB_API_KEY --lr 1",
    "docker -e PGPASSWORD=hidden -eS_SECRET=hidden x": "docker -e PGPASSWORD=$PGPASSWORD "
    "-eS_SECRET=$S_SECRET x",
    "srun --export=ALL,A_KEY=hidden,X=1 x": "srun --export=ALL,A_KEY=$A_KEY,X=1 x",
    "x.py 'https://h/?access_token=hidden&x=1'": 'x.py "https://h/?access_token=$access_token&x=1"',
    "bash -c 'A_KEY=hidden x --api-key \"hid den\" --key-file f'": "bash -c 'A_KEY=$A_KEY "
    "x --api-key $API_KEY --key-file f'",
}
UNCHANGED = (
    "MASTER_ADDR=node KEYS=1 TOKENIZER=x torchrun --nproc-per-node 8 x.py --seed 1",
    "x.py --tokenizer-model m --apply-query-key-layer-scaling --kv-channels 64",
    "x.py --fim-prefix-token '<fim>' --fim-eod-token=e --rl-skip-bos-token --lr 1",
    "x.py --use-auth-token --data-path /data/token=3/text 1.0 --api-key",
    "bash -c 'python x.py --save-tokens 3; the key is here, $KEY'",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_secret_is_not_shown(command: str) -> None:
    """Secrets in a shown command are masked, because pages, logs and JSON, which people send to
    each other, contain whole commands."""
    assert masked(shlex.split(command)) == COMMANDS[command]
    assert masked(shlex.split(COMMANDS[command])) == COMMANDS[command], "it may be given again"


@pytest.mark.parametrize("command", UNCHANGED)
def test_nothing_else_is_masked(command: str) -> None:
    assert masked(shlex.split(command)) == shlex.join(shlex.split(command))


def test_what_is_masked_can_be_pasted() -> None:
    """A masked command can be pasted into a shell, which replaces the names by the values of
    variables and expands nothing else."""
    words = ["A_KEY=hidden", '$HOME `x` "y"', "--export=B_KEY=hidden,it's $5 `", "--c-token", "t"]
    variables = {**os.environ, "A_KEY": "1", "B_KEY": "2", "C_TOKEN": "3"}
    shell = f"printf '%s\\n' {masked(words)}"
    printed = subprocess.check_output(["sh", "-c", shell], env=variables, text=True)
    expected = ["A_KEY=1", words[1], "--export=B_KEY=2,it's $5 `", "--c-token", "3"]
    assert printed.splitlines() == expected


def test_a_planned_command_and_a_page_have_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    added = Written(("--pipeline-schedule", "zb-v"))
    for command in (
        "WANDB_API_KEY=hidden torchrun --nproc-per-node 2 x.py --hf-token hidden --lr 1",
        "srun --export=WANDB_API_KEY=hidden bash -c 'HF_TOKEN=hidden python x.py --lr 1'",
    ):
        text = command_with(read_launch(shlex.split(command)), added)
        assert "hidden" not in text and "=$WANDB_API_KEY" in text and "zb-v" in text, text
    monkeypatch.setattr("sys.argv", ["megatron-ext", "plan", "--", "HF_TOKEN=hidden", "x.py"])
    assert output.command_line() == "megatron-ext plan -- HF_TOKEN=$HF_TOKEN x.py"
    with pytest.raises(ValueError, match=r"begins no launch command") as error:
        read_launch(["HF_TOKEN=hidden", "x"])
    assert "hidden" not in str(error.value)


def test_a_record_has_no_secret(tmp_path: Path) -> None:
    arguments = {"wandb_api_key": "hidden", "hf_token": None, "fim_pad_token": "<p>", "lr": 0.1}
    masked_arguments = {**arguments, "wandb_api_key": "$WANDB_API_KEY"}
    assert without_secrets(arguments) == masked_arguments
