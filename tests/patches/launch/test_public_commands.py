"""Tests of the answers of `doctor` and `plan` to launch commands of public scripts."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.doctor.launch_report import Severity
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, with_launch
from tests.helpers.megatron_runs import SCRIPT

_FILE = Path(__file__).with_name("public_commands.txt")
# Subjects of what doctor reports as missing: every command names such files, and they are not on
# this machine.
_FILES = {"datasets", "tokenizer", "checkpoints", "script"}


def commands() -> dict[str, str]:
    """Return the commands in public_commands.txt by their titles."""
    return dict(re.findall(r"^\[(.+)\]\n(.+)$", _FILE.read_text(), re.MULTILINE))


@dataclass(frozen=True)
class Answers:
    """Right answers to a public launch command.

    Attributes:
        ranks: number of ranks; None if the command does not tell.
        wrong: findings that doctor calls wrong, except missing files.
        remark: remark on flags; None if there is none.
        unchecked: reason why doctor does not check the command; "" if it does.
        plan: facts of its plan, or plan's refusal.
    """

    ranks: int | None
    plan: str
    wrong: tuple[str, ...] = ()
    remark: str | None = None
    unchecked: str = ""


NO_SIZES = "is not known to train by Megatron's arguments, and the command has none of the model's"
ANSWERS = {
    "mpirun, a DeepSpeed fork's flags, two stages": Answers(
        8,
        "--checkpoint-activations is no longer valid, use --recompute-activations",
        ("--checkpoint-activations is no longer valid, use --recompute-activations",),
        "has no flag --data-impl, --use-mpi",
    ),
    "mpirun, a fork's tokenizer": Answers(
        64,
        "argument --tokenizer-type: invalid choice: 'Llama3Tokenizer'",
        ("argument --tokenizer-type: invalid choice: 'Llama3Tokenizer'",),
    ),
    "torchrun, a layout, a tokenizer of a hub, experts": Answers(
        1024,
        "Transformer Engine cross entropy loss fusion is disabled due to stability issues",
        ("Transformer Engine cross entropy loss fusion is disabled due to stability issues",),
    ),
    "srun without sizes, old names of flags": Answers(
        None,
        "has no flag --activations-checkpoint-method; write --recompute-method",
        ("has no flag --activations-checkpoint-method", "has no flag --moe-num-experts"),
        "has no flag --data-impl, --moe-top-k",
    ),
    "torchrun, a fork's own flags and tokenizer": Answers(
        64,
        "argument --tokenizer-type: invalid choice: 'PretrainedFromHF'",
        ("argument --tokenizer-type: invalid choice: 'PretrainedFromHF'",),
    ),
    "torch.distributed.run, a layout, attention of a newer Megatron": Answers(
        32,
        "argument --experimental-attention-variant: invalid choice: 'dsv4_hybrid'",
        ("argument --experimental-attention-variant: invalid choice: 'dsv4_hybrid'",),
    ),
    "torchrun on one node, mock data": Answers(
        8, "8 layers on 8 ranks (TP 2 x PP 2 x DP 2), 1 microbatch of 1 x 1024 tokens"
    ),
    "srun starts torchrun, variables for its sizes": Answers(
        8, "8 layers on 8 ranks (TP 2 x PP 2 x DP 2), 16 microbatches of 4 x 512 tokens"
    ),
    "srun starts torchrun, another trainer": Answers(
        8, f"cannot be planned: ./train.py {NO_SIZES}", unchecked=f"./train.py {NO_SIZES}"
    ),
    "deepspeed, an old fork's flags": Answers(
        16,
        "--model-parallel-size is no longer valid, use --tensor-model-parallel-size instead",
        ("--model-parallel-size is no longer valid, use --tensor-model-parallel-size instead",),
        "has no flag --num-stages, --force-pp, --resume-dataloader, --train-data, --lazy-loader",
    ),
    "accelerate, another trainer": Answers(
        16, f"cannot be planned: trl.py {NO_SIZES}", unchecked=f"trl.py {NO_SIZES}"
    ),
    "torchrun, a fork's fused kernels": Answers(
        8,
        "32 layers on 8 ranks (TP 2 x PP 4), 16 microbatches of 1 x 4096 tokens",
        remark="has no flag --use-fused-rmsnorm, --use-fused-swiglu, --use-fused-rotary-pos-emb",
    ),
    "srun starts a shell, numactl and torchrun; a tokenizer of a hub, virtual stages": Answers(
        128,
        "--eval-interval is missing, and Megatron divides --train-iters by it",
        ("--eval-interval is missing, and Megatron divides --train-iters by it",),
    ),
    "torch.distributed.launch, a DeepSpeed fork's flags": Answers(
        128,
        "argument --tokenizer-type: invalid choice: 'PretrainedFromHF'",
        ("argument --tokenizer-type: invalid choice: 'PretrainedFromHF'",),
    ),
    "mpirun, ranks in the script's own flags, a tokenizer of a hub": Answers(
        64,
        "80 layers on 64 ranks (TP 4 x PP 8 x DP 2), 256 microbatches of 1 x 4096 tokens",
        remark="has no flag --rank, --world-size, --dist-url",
    ),
    "torchrun, a script and flags of a fork's own, no tokenizer": Answers(
        32,
        "argument --optimizer: invalid choice: 'hybridadam'",
        ("argument --optimizer: invalid choice: 'hybridadam'",),
    ),
    "torchrun, a ramp, ranks fewer than the model's": Answers(
        8,
        "world size (8) is not divisible by total_model_size (total_model_size=128)",
        ("world size (8) is not divisible by total_model_size (total_model_size=128)",),
    ),
    "torchrun, a layout with multi-token prediction, a tokenizer of a hub, FP8": Answers(
        256,
        "Transformer Engine cross entropy loss fusion is disabled due to stability issues",
        ("Transformer Engine cross entropy loss fusion is disabled due to stability issues",),
    ),
    "mpirun, experts, weights of data": Answers(
        16,
        "24 layers on 16 ranks (EP 8 x PP 2 x DP 8), 64 microbatches of 2 x 4096 tokens",
        remark="has no flag --use-mpi",
    ),
}


def test_each_command_has_its_answers() -> None:
    assert commands().keys() == ANSWERS.keys()


def test_the_table_is_broad() -> None:
    """At least twelve of the public commands have a pipeline. The commands come from six owners and
    start with four launchers, and among them are a tokenizer of a hub, a layout, and a fork's own
    flags."""
    text = {
        title: command
        for title, command in commands().items()
        if re.search(r"--pipeline-model-parallel-size ([2-9]|\d\d)", command)
    }
    assert len(text) >= 12
    owners = dict(re.findall(r"^# from (\S+)/\S+\n\[(.+)\]$", _FILE.read_text(), re.MULTILINE))
    assert len(owners) >= 6
    launchers = {"torchrun", "torch.distributed", "mpirun", "srun"}
    assert all(any(title.startswith(one) for title in text) for one in launchers)
    assert any("--tokenizer-model hub/" in command for command in text.values())
    assert any("--pipeline-model-parallel-layout" in command for command in text.values())
    assert any(ANSWERS[title].remark for title in text)


@pytest.mark.parametrize("title", ANSWERS)
def test_the_answers_of_doctor_and_plan(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPT.parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    answers = ANSWERS[title]
    launch = read_launch(shlex.split(commands()[title]))
    assert launch.world_size == answers.ranks
    report = check_launch(launch, None, None)
    wrong = [
        finding.text
        for finding in report.findings
        if finding.verdict is Severity.WRONG and finding.subject not in _FILES
    ]
    assert len(wrong) == len(answers.wrong), wrong
    assert all(right in text for right, text in zip(answers.wrong, wrong, strict=True)), wrong
    sizes = [finding.fix for finding in report.findings if "assumed: one copy" in finding.text]
    assert all("or a launcher with its sizes in numbers" in fix for fix in sizes)
    assert bool(sizes) == (answers.ranks is None)
    stops = [finding.fix for finding in report.findings if finding.text.startswith("argument --")]
    assert all(fix.startswith("Megatron stops here, and so does this check") for fix in stops)
    remarks = [
        finding.text
        for finding in report.findings
        if finding.verdict is Severity.REMARK and finding.subject == "flags"
    ]
    assert len(remarks) == (answers.remark is not None), remarks
    assert answers.remark is None or answers.remark in remarks[0]
    assert answers.unchecked in report.unchecked
    assert bool(answers.unchecked) == bool(report.unchecked)
    assert answers.plan in planned(shlex.split(commands()[title]))


def planned(words: list[str]) -> str:
    """Return the facts that a plan of the command ``words`` prints, or the reason why there is no
    plan."""
    try:
        return with_launch(LaunchRequest(read_launch(words)), lambda parsed: parsed.facts)
    except ValueError as error:
        return str(error)
