"""Test that runs the commands of README.md and docs/index.md, or has a reason why a command does
not run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.helpers.ranks import HANGS
from tests.helpers.short_search import shorten_search

ROOT = Path(__file__).parents[3]
QUICKSTART = "scripts/quickstart.sh --pipeline-trace runs/traces --pipeline-trace-iters 3:5"
ON_EIGHT = "torchrun --nproc-per-node 8 -m megatron_ext pretrain_gpt.py $YOUR_FLAGS"

NOT_RUN = {
    "scripts/quickstart.sh": "run as docs/index.md has it",
    "scripts/test.sh": "runs this test",
    "scripts/test.sh --quick": "runs most of these tests",
    "source .venv/bin/activate": "tests run in an environment already",
    "pip install .": "tests/unit/house/test_packaging.py makes the package and imports it",
    "torchrun --nproc-per-node 8 pretrain_gpt.py $YOUR_FLAGS": "Megatron's own, on 8 GPUs",
    f"{ON_EIGHT} --pipeline-schedule zb-h1": "8 GPUs; the quick start launches so on the CPU",
    f"{ON_EIGHT} --pipeline-trace traces": "8 GPUs; test_stock_trace.py has two",
    f'{ON_EIGHT} --pipeline-race "zb-h1 zb-auto"': "8 GPUs; test_race.py has two",
    "megatron-ext parity -- torchrun --nproc-per-node 8 pretrain_gpt.py $YOUR_FLAGS "
    "--pipeline-schedule zb-h1": "8 GPUs; test_parity_command.py has two",
    "megatron-ext doctor -- torchrun --nproc-per-node 8 pretrain_gpt.py $YOUR_FLAGS": "run as "
    "docs/index.md has it",
    "megatron-ext doctor train.log": "test_megatron_log.py and "
    "test_documented_outputs.py have logs",
    "sbatch scripts/slurm/pretrain.sh $YOUR_FLAGS": "tests/slurm runs it on a SLURM of two nodes",
    "scripts/gpu_tests.sh": "needs GPUs; tests/unit/house/test_shell_scripts.py reads it",
}


def commands(page: str) -> list[str]:
    """Return the commands of a page, each on one line, without comments and environment
    variables."""
    blocks = re.findall(r"```(?:bash|diff)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    plain = (re.sub(r"^[-+] |^([A-Z]+=\S+ )+|\s#.*", "", line) for line in lines)
    return [" ".join(line.split()) for line in plain]


ALL = [*commands("README.md"), *commands("docs/index.md")]


def test_what_is_not_run_stands_on_a_page() -> None:
    assert set(NOT_RUN) <= set(ALL)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documented commands run, the quick start first, because other commands read files that
    the quick start has written. The quick start is shortened here: two ranks, fewer layers,
    microbatches and iterations, no evaluation, and a short search."""
    shorten_search(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pretrain_gpt.py").symlink_to(SCRIPT)
    flags = model_flags(pipeline_model_parallel_size=4, transformer_impl="local")
    run = [command for command in dict.fromkeys(ALL) if command not in NOT_RUN]
    assert QUICKSTART in run
    for command in sorted(run, key=lambda text: text != QUICKSTART):
        print(f"$ {command}")
        words = shlex.split(command.replace("$YOUR_FLAGS", shlex.join(flags)))
        if words[0] == "megatron-ext":
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, f"{command}: {result.output}"
        else:
            assert command == QUICKSTART, f"{command}: run it here, or say in NOT_RUN why not"
            train(words[1:])
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "traces",
        "zb-v.svg",
        "plan.svg",
    }


SHORTER = ("--num-layers", "4", "--global-batch-size", "8", "--eval-iters", "0")


def train(flags: list[str]) -> None:
    """Train as scripts/quickstart.sh does once its environment exists."""
    ended = subprocess.run(
        [sys.executable, ROOT / "scripts" / "quickstart.py", *SHORTER, *flags],
        env={**os.environ, "NPROC": "2", "ITERS": "5", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * HANGS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"^loss +\d\.\d+ -> \d\.\d+$", ended.stdout, re.MULTILINE), ended.stdout
