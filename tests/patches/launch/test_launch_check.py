"""Tests of `megatron-ext doctor -- SCRIPT ARGS`, which finds mistakes of a launch on a login node
and says what to do."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import num_microbatches_calculator
from megatron.training import global_vars
from typer.testing import CliRunner

from megatron_ext.adapter.model_bytes import model_bytes_of_ranks
from megatron_ext.cli import app
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.launch_words import Launch, read_launch
from megatron_ext.launch.command.unknown_words import RENAMED
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.doctor.environment import dataset_helpers
from megatron_ext.launch.doctor.launch_report import Report, Severity
from megatron_ext.launch.doctor.rank_variables import check_rank_variables
from megatron_ext.launch.planner import launch_choice
from megatron_ext.patches.engine import applied
from megatron_ext.schedule.placement import Placement, line, v
from megatron_ext.schedule.problem import VocabularyParallel
from tests.helpers.megatron_runs import SCRIPT, model_flags

FLAGS = {
    "pipeline_model_parallel_size": 4,
    "num_layers": 8,
    "pipeline_schedule": "zb-v",
    "transformer_impl": "local",
}
SPARSE: dict[str, Any] = {
    "experimental_attention_variant": "dsa",
    "multi_latent_attention": True,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a login node without a GPU, whatever the machine of the test has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)


def checked(
    *more: str, world_size: int | None = None, memory: float | None = None, **overrides: object
) -> Report:
    words = (*model_flags(**(FLAGS | overrides)), *more)
    gpu = None if memory is None else replace(GPUS["h100"], memory=memory)
    return check_launch(Launch(str(SCRIPT), False, words), world_size, gpu)


def told(report: Report, verdict: Severity) -> list[str]:
    findings = [finding for finding in report.findings if finding.verdict is verdict]
    return [f"{finding.subject}: {finding.text}; {finding.fix}" for finding in findings]


def test_a_right_command() -> None:
    sizes: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "seq_length": 1024}
    report = checked(world_size=8, max_position_embeddings=1024, **sizes)
    assert report.is_right, told(report, Severity.WRONG)
    right = {finding.subject for finding in report.findings if finding.verdict is Severity.RIGHT}
    assert right >= {"script", "patches", "flags", "arguments", "batch size", "model", "schedule"}
    assert "training: 40 samples to train on, 0 to validate on, 0 to test on; " in told(
        report, Severity.RIGHT
    )
    prediction = report.prediction
    assert prediction is not None
    assert prediction.schedule == "zb-v" and prediction.microbatches == 4
    assert prediction.bubble is not None and prediction.bubble_1f1b is not None
    assert 0 < prediction.bubble < prediction.bubble_1f1b
    assert [rank.layers for rank in prediction.ranks] == [2, 2, 2, 2]
    assert all((rank.activation_bytes or 0) > 0 for rank in prediction.ranks)


def test_a_bubble_of_sparse_attention_has_no_estimate() -> None:
    """`doctor` predicts no bubble of a model with sparse attention. It used to predict that of
    plain attention, whose steps take a fifth to five times as long. Memory is still predicted."""
    report = checked(**SPARSE)
    prediction = report.prediction
    assert prediction is not None and prediction.bubble is None, told(report, Severity.WRONG)
    assert all((rank.activation_bytes or 0) > 0 for rank in prediction.ranks)
    schedule = next(text for text in told(report, Severity.RIGHT) if text.startswith("schedule"))
    assert "no estimate of its bubble: how long sparse attention (dsa) takes" in schedule
    assert "%" not in schedule


def test_the_weights_of_samples_are_read(tmp_path: Path) -> None:
    """`doctor` reads the file of --pipeline-microbatch-weights. doctor used to say that nothing is
    wrong, and a missing or unreadable file ended the training when it read its data."""
    weights = tmp_path / "weights.npy"
    ordered: dict[str, Any] = {
        "pipeline_microbatch_order": "small-ends",
        "pipeline_microbatch_weights": weights,
    }
    named = f"microbatches: --pipeline-microbatch-weights {weights} "
    assert any(text.startswith(named) for text in told(checked(**ordered), Severity.WRONG))
    weights.write_text("1 2 3")
    assert any(text.startswith(named) for text in told(checked(**ordered), Severity.WRONG))
    for wrong, why in ((np.ones((2, 2)), "has shape (2, 2)"), (np.array(["a"]), "of numbers")):
        np.save(weights, wrong)
        (text,) = told(checked(**ordered), Severity.WRONG)
        assert text.startswith(named) and why in text
    np.save(weights, np.ones(3))
    assert (report := checked(**ordered)).is_right, told(report, Severity.WRONG)


def test_host_memory_of_offload_is_predicted() -> None:
    for way, expected in (("none", False), ("full", True)):
        report = checked(pipeline_activation_offload=way)
        assert report.is_right, told(report, Severity.WRONG)
        said = [text for text in told(report, Severity.RIGHT) if text.startswith("host memory: ")]
        assert bool(said) == expected


def test_what_the_estimate_does_not_know_is_said() -> None:
    report = checked(num_experts=4, moe_expert_capacity_factor=1.5)
    (told_of,) = [text for text in told(report, Severity.REMARK) if text.startswith("estimate: ")]
    assert "does not know --moe-expert-capacity-factor: no token is dropped" in told_of
    assert not any(text.startswith("estimate: ") for text in told(checked(), Severity.REMARK))


def test_cuda_graphs_are_captured_in_one_order(tmp_path: Path) -> None:
    graphs: dict[str, Any] = {"cuda_graph_impl": "transformer_engine"}
    assert (report := checked(**graphs)).is_right, told(report, Severity.WRONG)
    wrong = checked(**graphs, pipeline_schedule=None, pipeline_race="zb-h1 1f1b")
    assert any("graphs are captured in the order of one" in t for t in told(wrong, Severity.WRONG))
    wrong = checked(**graphs, pipeline_costs=f"profile:{tmp_path / 'costs'}", train_iters=20)
    assert any("measured costs may change" in t for t in told(wrong, Severity.WRONG))


def test_megatrons_own_pipeline_is_predicted_too() -> None:
    report = checked(pipeline_schedule=None, num_layers_per_virtual_pipeline_stage=1)
    assert report.is_right, told(report, Severity.WRONG)
    assert report.prediction is not None
    assert report.prediction.schedule.startswith("interleaved")
    assert any("nothing is patched" in text for text in told(report, Severity.RIGHT))
    prediction = checked(pipeline_schedule=None).prediction
    assert prediction is not None and prediction.schedule == "1f1b"


def test_a_race_is_predicted() -> None:
    """`doctor` predicts a race of schedules (--pipeline-race): the gain of each candidate over the
    baseline, and whether the training has enough iterations for the race."""
    report = checked(pipeline_schedule=None, pipeline_race="zb-h1 zb-1p")
    assert report.is_right, told(report, Severity.WRONG)
    right = [text for text in told(report, Severity.RIGHT) if text.startswith("race: ")]
    assert [text.split()[1] for text in right] == ["zb-h1", "zb-1p"]
    assert "times as fast as 1f1b, peak 4 microbatches (" in right[0]
    assert report.prediction is not None and report.prediction.schedule == "1f1b"
    (remark,) = [text for text in told(report, Severity.REMARK) if text.startswith("race: ")]
    assert "it takes up to 150 iterations, and the training has fewer; train longer" in remark
    wrong = checked(pipeline_schedule=None, pipeline_race="gpipe", pipeline_memory_limit="4")
    assert any("gpipe cannot race" in text for text in told(wrong, Severity.WRONG))


def test_a_race_of_sparse_attention_is_not_predicted() -> None:
    """A race of a model with sparse attention has no predicted gains. They used to be those of
    plain attention."""
    report = checked(**SPARSE, pipeline_schedule=None, pipeline_race="zb-h1")
    (text,) = [text for text in told(report, Severity.RIGHT) if text.startswith("race: ")]
    assert "zb-h1 has no estimate of its speed relative to 1f1b, peak 4 microbatches (" in text
    assert "times as fast" not in text


@pytest.mark.parametrize("schedule", ["plan", "auto"])
def test_no_schedule_is_chosen_for_sparse_attention(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--pipeline-schedule plan and an auto that leaves schedules open refuse a model with sparse
    attention without costs. They used to choose by times of plain attention, and to print a
    gain."""
    report = checked(**SPARSE, pipeline_schedule=schedule)
    (text,) = told(report, Severity.WRONG)
    assert f"--pipeline-schedule {schedule} compares times of schedules, and there is no" in text
    assert "how long sparse attention (dsa) takes is not known" in text

    def compare(*_: object) -> None:
        raise ValueError("here schedules would be compared")

    monkeypatch.setattr(launch_choice, "_jobs", compare)
    costs = "f=10,i=12,w=8,comm=1"
    given = checked(**SPARSE, pipeline_schedule=schedule, pipeline_costs=costs)
    assert any("would be compared" in text for text in told(given, Severity.WRONG))


def test_whether_megatrons_own_pipeline_can_be_watched(tmp_path: Path) -> None:
    stock: dict[str, Any] = {"pipeline_schedule": None, "pipeline_trace": tmp_path / "traces"}
    report = checked(**stock, train_iters=8)
    assert report.is_right, told(report, Severity.WRONG)
    assert any("are needed, and fit Megatron" in text for text in told(report, Severity.RIGHT))
    (wrong,) = told(checked(**stock, train_iters=6), Severity.WRONG)
    assert "traces iterations 5 to 7 of a run, and the last iteration is 6 (--train-iters)" in wrong
    remarks = told(checked(**stock, train_iters=8, pipeline_model_parallel_size=1), Severity.REMARK)
    assert any("nothing of Megatron's step will be seen" in text for text in remarks)


def test_the_default_layers_need_no_transformer_engine_here() -> None:
    """`doctor` checks commands with Megatron's default layers, or with rope, on a machine without
    Transformer Engine. On such a login node these commands used to be refused."""
    newest: dict[str, Any] = {"qk_clip": True, "fp8_format": "hybrid", "bf16": True}
    report = checked(transformer_impl=None, position_embedding_type="rope", **newest)
    assert report.is_right, told(report, Severity.WRONG)
    assert any("the newest Transformer Engine" in text for text in told(report, Severity.REMARK))


def test_nothing_is_left_behind() -> None:
    arguments = (
        megatron_arguments.arguments.get_device_arch_version,
        megatron_arguments.arguments.validate_args,
    )
    checked(tensor_model_parallel_size=2, num_attention_heads=4)
    assert arguments == (
        megatron_arguments.arguments.get_device_arch_version,
        megatron_arguments.arguments.validate_args,
    )
    assert not applied() and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None
    assert global_vars._GLOBAL_ARGS is None and not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("overrides", "more", "subject", "text"),
    [
        ({"micro_batch_size": None}, ("--micro_batch_siz", "1"), "flags", "--micro-batch-size?"),
        ({}, ("--mock-data", "yes"), "flags", "'yes' belongs to no flag; drop it: the flag before"),
        (
            {},
            ("--step-batch-size-schedule", "0:160", "2.4B:320", "5B:640"),
            "flags",
            "'2.4B:320' belongs to no flag; write --step-batch-size-schedule "
            "'0:160 2.4B:320 5B:640', quoted for the shell,",
        ),
        (
            {},
            ("--step-batch-size-schedule=0:160", "2.4B:320", "--bf16"),
            "flags",
            "write --step-batch-size-schedule='0:160 2.4B:320', quoted for the shell,",
        ),
        # Quoted flags in one word, as from "$ARGS", used to get the advice "no flag; drop it,
        # unless the script adds it".
        ({}, ("--bf16 --lr 1",), "flags", "--bf16 and what follows it are one word"),
        ({}, ("\n    --lr=1\n    --bf16\n",), "flags", "--lr and what follows it are one word"),
        ({"num_layers": "four"}, (), "flags", "--num-layers: invalid int value: 'four'"),
        ({"pipeline_schedule": "zb-h9"}, (), "flags", "did you mean zb-h1"),
        ({"num_layers": 6}, (), "schedule", "6 layers cannot be split evenly over 8 stages"),
        (
            {"pipeline_schedule": None, "num_layers": 6},
            (),
            "arguments",
            "layers cannot be split evenly over ",
        ),
        ({"global_batch_size": 7, "micro_batch_size": 2}, (), "arguments", "eval_global_batch_siz"),
        (
            {"global_batch_size": 7, "micro_batch_size": 2, "eval_global_batch_size": 2},
            (),
            "batch size",
            "global batch size (7) is not divisible by micro batch size (2)",
        ),
        (
            {"tensor_model_parallel_size": 4, "num_attention_heads": 2},
            (),
            "model",
            "num_attention_heads (2) must be a multiple of tensor_model_parallel_size (4)",
        ),
        ({"eval_interval": None}, (), "training", "--eval-interval is missing"),
        (
            {"lr_warmup_iters": 5},
            (),
            "training",
            "Megatron asserts: assert self.lr_warmup_steps < self.lr_decay_steps",
        ),
        ({"train_iters": None}, (), "training", "either train-iters or train-samples should be"),
        ({"micro_batch_size": 0}, (), "arguments", "--micro-batch-size 0: there must be"),
        ({"checkpoint_activations": True}, (), "arguments", "is no longer valid"),
        (
            {"use_ring_exchange_p2p": True},
            (),
            "schedule",
            "drop --use-ring-exchange-p2p",
        ),
        ({"fake_process_group": True}, (), "schedule", "write megatron-ext rehearse -- before"),
        ({"pipeline_memory_limit": "1"}, (), "schedule", "over the memory limit of 1"),
        (
            {"mock_data": None, "data_path": "/no/data"},
            (),
            "datasets",
            "there is no /no/data.bin; correct the path",
        ),
        ({"data_args_path": "/no/list"}, (), "datasets", "the list of datasets cannot be read"),
        ({"data_cache_path": "/dev/null/cache"}, (), "datasets", "/dev/null is no folder"),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "/no/model"},
            (),
            "tokenizer",
            "there is no /no/model",
        ),
        ({"load": "/no/checkpoint"}, (), "checkpoints", "there is no folder /no/checkpoint"),
        ({"save": "/dev/null/x", "save_interval": 5}, (), "checkpoints", "/dev/null is no folder"),
        ({"save": "/tmp/x"}, (), "arguments", "assert args.save_interval is not None"),
    ],
)
def test_a_mistake_is_found(
    overrides: dict[str, Any], more: tuple[str, ...], subject: str, text: str
) -> None:
    wrong = told(checked(*more, **overrides), Severity.WRONG)
    assert any(line.startswith(subject) and text in line for line in wrong), wrong


def test_a_world_size_that_does_not_divide() -> None:
    wrong = told(checked(world_size=6), Severity.WRONG)
    assert "world size (6) is not divisible by total_model_size" in wrong[0]
    assert any("4 ranks assumed" in text for text in told(checked(), Severity.REMARK))


def test_a_world_size_that_overrules_the_launchers_says_so() -> None:
    """`doctor --world-size 16` says that 16 counts and not the log's or launcher's 8 ranks. `doctor
    --world-size 16 train.log` used to print both numbers, and not which of the two it took."""
    words = tuple(model_flags(**FLAGS))
    launch = Launch(str(SCRIPT), False, words, world_size=8, installs=True)
    for ranks, said in ((16, True), (8, False), (None, False)):
        remarks = told(check_launch(launch, ranks, None), Severity.REMARK)
        text = "world size: --world-size 16 counts, not 8, which the launch has; "
        assert (text in remarks) is said


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ("mpirun -np 8 python x.py", "OMPI_COMM_WORLD_RANK"),
        ("mpirun -np 8 python -m megatron_ext x.py", "OMPI_COMM_WORLD_RANK"),
        ("srun -n 8 python x.py", "SLURM_PROCID"),
        ("srun -n 8 apptainer exec image python x.py", "SLURM_PROCID"),
        ("srun -n 8 python -m megatron_ext x.py", ""),
        ("srun -N 2 torchrun --nproc-per-node 4 x.py", ""),
        ("srun -n 2 accelerate launch --num_processes 8 x.py", ""),
        ("mpirun -np 8 ./ranks.sh python x.py", ""),
        ("srun -n 8 bash -c 'RANK=$SLURM_PROCID python x.py'", ""),
        ("mpirun -np 1 python x.py", ""),
        ("python x.py", ""),
    ],
)
def test_ranks_that_megatron_would_not_find(command: str, variable: str) -> None:
    """`doctor` remarks if Megatron would not find the ranks that a launcher starts. It used to say
    "right: 8 ranks" of commands under Open MPI in which each process would have trained alone."""
    launch = read_launch(shlex.split(command))
    found = check_rank_variables(launch, "import megatron.training")
    assert [finding.verdict for finding in found] == [Severity.REMARK] * bool(variable)
    assert all(finding.text.endswith(f"the launcher sets {variable}") for finding in found)
    assert not check_rank_variables(launch, f"rank = os.environ['{variable}']")


def test_a_launch_of_mpi_has_the_remark_on_its_ranks() -> None:
    launch = read_launch(["mpirun", "-np", "4", "python", str(SCRIPT), *model_flags(**FLAGS)])
    remarks = told(check_launch(launch, None, None), Severity.REMARK)
    assert any(text.startswith("ranks: Megatron reads RANK") for text in remarks)


def test_an_assertion_of_a_missing_argument_names_its_flag() -> None:
    """`doctor` names the flag of a missing argument. It used to print Megatron's "assert
    args.save_interval is not None", from which a user had to guess the flag."""
    (wrong,) = told(checked(save="/tmp/saved"), Severity.WRONG)
    assert wrong.startswith("arguments: --save-interval is missing, add it with its value: ")


def test_a_wrong_setting_of_ours_leaves_no_row_of_right_flags() -> None:
    report = checked(pipeline_schedule="zb-h1", pipeline_memory_limit="much")
    rows = [row for row in report.findings if row.subject == "flags"]
    assert [row.verdict for row in rows] == [Severity.WRONG] and "'much'" in rows[0].text


def test_memory_is_judged_if_a_gpu_is_given() -> None:
    assert checked(memory=2**30).is_right
    (wrong,) = told(checked(memory=2**10), Severity.WRONG)
    assert "pipeline rank 3 takes the most" in wrong


def test_a_check_takes_the_rates_of_the_gpu() -> None:
    """`doctor --gpu` predicts with the rates of that GPU. It used to take only the GPU's memory,
    and the rates of an H100."""
    reports = [
        check_launch(launch, None, GPUS[gpu])
        for launch in [Launch(str(SCRIPT), False, tuple(model_flags(**FLAGS)))]
        for gpu in ("h100", "a100", "b200")
    ]
    bubbles = [report.prediction.bubble for report in reports if report.prediction]
    assert len(set(bubbles)) == 3


def test_what_slices_would_give_is_said() -> None:
    """`doctor` says what slices of a sequence would gain if a launch has fewer microbatches than
    pipeline ranks. It does not say so of a launch that has slices, enough microbatches, or short
    sequences."""
    sizes: dict[str, Any] = {
        **{"hidden_size": 4096, "num_attention_heads": 32, "padded_vocab_size": 32000},
        **{"seq_length": 8192, "max_position_embeddings": 8192, "pipeline_schedule": "1f1b"},
        "global_batch_size": 2,
    }
    (remark,) = [text for text in told(checked(**sizes), Severity.REMARK) if "slices:" in text]
    assert re.match(
        r"slices: with --pipeline-schedule \S+ --pipeline-slices [248] --pipeline-slice-lengths "
        r"balanced( --pipeline-join-slice-weights)? a step is predicted to take -\d+\.\d%: "
        r"[\d.]+% bubbles in place of [\d.]+%, "
        r".* GiB on the fullest rank in place of .* GiB",
        remark,
    ), remark
    assert "megatron-ext plan -- COMMAND compares them" in remark
    # Slices of short sequences cost more than they gain, so the remark is missing.
    short = {"seq_length": 256, "max_position_embeddings": 256}
    for changes in ({"pipeline_slices": 4}, {"global_batch_size": 4}, short):
        other = checked(**(sizes | changes))
        assert not any("slices:" in text for text in told(other, Severity.REMARK)), changes


def test_what_communicators_take() -> None:
    (text,) = communicators_of(checked(), Severity.RIGHT)
    assert "up to 8 beyond Megatron's own (8 for messages, 0 for collectives), 4 CTAs each" in text
    assert "they take 32 of a GPU's 132 multiprocessors" in text and "147 MiB" in text
    no_longer = (
        "--pipeline-p2p batched makes none of them, and a step is predicted to take no longer"
    )
    assert no_longer in text, "launching its passes takes longest in so small a model"
    (text,) = communicators_of(checked(pipeline_costs="f=10,i=12,w=8,comm=5"), Severity.RIGHT)
    assert "--pipeline-p2p batched makes none of them, for a step predicted" in text
    (text,) = communicators_of(checked(pipeline_vocab_parallel=2), Severity.RIGHT)
    assert "15 beyond Megatron's own (8 for messages, 7 for collectives), 2 CTAs each" in text
    assert "batched" not in text, "it does not go with vocabulary parallelism"
    (text,) = communicators_of(checked(pipeline_p2p="batched"), Severity.RIGHT)
    assert "none beyond Megatron's own" in text
    assert not communicators_of(checked(pipeline_schedule=None), Severity.RIGHT)


def communicators_of(report: Report, verdict: Severity) -> list[str]:
    return [text for text in told(report, verdict) if text.startswith("communicators: ")]


def test_communicators_as_the_user_has_set_them(tmp_path: Path) -> None:
    file = tmp_path / "nccl.yaml"
    file.write_text("dp: {max_ctas: 2}\npp: {max_ctas: 12, cga_cluster_size: 2}")
    (text,) = communicators_of(checked(nccl_communicator_config_path=file), Severity.REMARK)
    assert "16 CTAs each: they take 128 of a GPU's 132 multiprocessors" in text
    assert "write 4 for max_ctas and min_ctas of pp" in text
    file.write_text("pp: {max_ctas: 2}")
    (text,) = communicators_of(checked(nccl_communicator_config_path=file), Severity.RIGHT)
    assert "they take 16 of" in text
    for content in ("pp: [", "pp: 3"):
        file.write_text(content)
        (text,) = communicators_of(checked(nccl_communicator_config_path=file), Severity.WRONG)
        assert f"--nccl-communicator-config-path {file}: " in text
    (text,) = communicators_of(checked(nccl_communicator_config_path="/no/file"), Severity.WRONG)
    assert "No such file" in text and "correct the path" in text


def test_communicators_that_do_not_fit() -> None:
    """`doctor` recommends batched messages if the buffers of NCCL communicators do not fit into the
    GPU's memory."""
    assert communicators_of(checked(memory=2**31), Severity.RIGHT)
    (text,) = communicators_of(checked(memory=2**30), Severity.REMARK)
    assert "147 MiB of buffers over NVLink, and the GPU has" in text and "MiB left" in text
    assert "--pipeline-p2p batched makes none of them" in text


def test_flags_that_may_be_the_scripts_own(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("parser.add_argument('--my-rate')")
    words = (*model_flags(**FLAGS), "--my-rate", "3", "--elsewhere", "4", "5")
    report = check_launch(Launch(str(script), False, words), None, None)
    assert report.is_right, told(report, Severity.WRONG)
    assert any("--my-rate is the script's own" in text for text in told(report, Severity.RIGHT))
    assert any("has no flag --elsewhere;" in text for text in told(report, Severity.REMARK))
    missing = check_launch(Launch("no.py", False, words), None, None)
    assert any(text.startswith("script: ") for text in told(missing, Severity.WRONG))


def test_flags_of_modules_that_the_script_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` accepts flags of modules that the script imports. --num-layer, a flag that a module
    next to the script defines, used to be called wrong with "did you mean --num-layers?". A module
    that exists only on another machine may define the flag too."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "examples" / "images"
    (folder / "more").mkdir(parents=True)
    script = folder / "train.py"
    script.write_text("import torch\nfrom own_args import add\nfrom more import flags\n")
    (folder / "own_args.py").write_text("parser.add_argument('--num-layer', type=int)")
    (folder / "more" / "flags.py").write_text("from . import deeper")
    (folder / "more" / "deeper.py").write_text('parser.add_argument("--train-iterss")')
    words = (*model_flags(**FLAGS), "--num-layer", "3", "--train-iterss", "4", "--use-mpi")
    report = check_launch(Launch(str(script), False, words), None, None)
    assert report.is_right, told(report, Severity.WRONG)
    right = told(report, Severity.RIGHT)
    assert "flags: --num-layer, --train-iterss are the script's own; " in right
    (remark,) = (text for text in told(report, Severity.REMARK) if text.startswith("flags: "))
    assert remark.endswith(
        "has no flag --use-mpi; drop it, unless the script adds it: Megatron would refuse it"
    )
    script.write_text("from elsewhere.arguments import add\n")
    report = check_launch(Launch(str(script), False, words), None, None)
    assert report.is_right, told(report, Severity.WRONG)
    assert any(
        "has no flag --num-layer, --train-iterss, --use-mpi; did you mean --num-layers by" in text
        for text in told(report, Severity.REMARK)
    )
    script.write_text("try:\n    import elsewhere\nexcept ImportError:\n    pass\n")
    report = check_launch(Launch(str(script), False, words), None, None)
    assert len(told(report, Severity.WRONG)) == 2, told(report, Severity.WRONG)


def test_flags_of_older_scripts() -> None:
    """`doctor` suggests today's names for flags of older Megatron scripts. It used to suggest the
    opposite of --no-query-key-layer-scaling, --use-mup for --use-mpi, and called an old name "the
    script's own, perhaps"."""
    words = ("--use-mpi", "--no-query-key-layer-scaling", "--tensor-parallel-size", "2")
    report = checked(*words, "--moe-num-experts", "8", "--no-overlap-grad-reduce")
    (wrong,) = told(report, Severity.WRONG)
    assert re.fullmatch(
        r"flags: Megatron [\d.]+ has no flag --moe-num-experts; write --num-experts", wrong
    )
    (remark,) = (text for text in told(report, Severity.REMARK) if text.startswith("flags: "))
    assert "has no flag --use-mpi, --no-query-key-layer-scaling, --tensor-parallel-size, --no-" in (
        remark
    )
    suggestion = "did you mean --tensor-model-parallel-size by --tensor-parallel-size?; drop them"
    assert remark.count("did you mean") == 1 and suggestion in remark


def test_todays_names_of_old_flags() -> None:
    """No old name in the table of renamed flags is a flag of this Megatron, and each new name is
    one."""
    flags = set(megatron_arguments.parse_arguments(()).flags)
    for old, today in RENAMED.items():
        assert old not in flags and today.split()[0] in flags, old


FP8 = {"fp8_format": "hybrid", "fp8_recipe": "delayed", "transformer_impl": None}
HISTORY = {**FP8, "fp8_amax_compute_algo": "max", "fp8_amax_history_len": 4}
RECOMPUTED = {**HISTORY, "recompute_granularity": "selective"}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (HISTORY, "counts the passes of all stages of a rank"),
        ({**HISTORY, "pipeline_schedule": "zb-h1"}, None),
        ({**HISTORY, "pipeline_schedule": "interleaved-zb"}, None),
        ({**RECOMPUTED, "pipeline_schedule": "zb-h1"}, None),
        ({**RECOMPUTED, "pipeline_schedule": "zb-2p"}, "a recomputed pass counts in the history"),
        ({**HISTORY, "pipeline_schedule": "zb-2p"}, None),
        (FP8, None),
        ({**FP8, "eval_iters": 1}, "an evaluation leaves amaxes"),
        ({**FP8, "eval_iters": 1, "pipeline_schedule": "zb-h1"}, None),
        ({**HISTORY, "fp8_recipe": "tensorwise"}, None),
        ({**HISTORY, "pipeline_schedule": None}, None),
        ({}, None),
    ],
)
def test_schedules_with_other_scales(overrides: dict[str, Any], text: str | None) -> None:
    """`doctor` remarks if a schedule has other FP8 scales than stock. docs/compatibility.md
    named these schedules, and doctor used not to mention it."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
    report = checked(max_position_embeddings=32, **(sizes | overrides))
    assert report.is_right, told(report, Severity.WRONG)
    found = [t for t in told(report, Severity.REMARK) if t.startswith("low precision: ")]
    assert len(found) == (text is not None), found
    assert text is None or text in found[0]


def from_command(beginning: str, **overrides: object) -> Report:
    """Return doctor's report on a launch command that starts with ``beginning`` and has the flags
    of this test."""
    words = (*shlex.split(beginning), *model_flags(**(FLAGS | overrides)))
    return check_launch(read_launch(words), None, None)


def test_our_flags_need_us_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` calls a command wrong that has our flags but does not start megatron_ext. It used to
    find nothing wrong, and the launch ended with "unrecognized arguments"."""
    (wrong,) = told(from_command(f"torchrun --nproc-per-node 4 {SCRIPT}"), Severity.WRONG)
    assert "our flags need -m megatron_ext before" in wrong
    assert f"write -m megatron_ext {SCRIPT} in place of {SCRIPT}" in wrong
    assert not from_command(f"python {SCRIPT}").is_right
    assert from_command(f"torchrun --nproc-per-node 4 {SCRIPT}", pipeline_schedule=None).is_right
    assert from_command(f"torchrun --nproc-per-node 4 -m megatron_ext {SCRIPT}").is_right
    report = from_command(str(SCRIPT))
    assert report.is_right, "it may be behind what is not shown"
    assert any(f"launch it as -m megatron_ext {SCRIPT}" in r for r in told(report, Severity.REMARK))

    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.py"
    for text, right in (
        ("import megatron_ext\n", True),
        ("if True:\n    from megatron_ext import install\n", True),
        ("# launch it with -m megatron_ext\nimport megatron\n", False),
    ):
        mine.write_text(text)
        assert from_command("torchrun --nproc-per-node 4 mine.py").is_right is right, text
        assert from_command("torchrun --nproc-per-node 4 -m mine").is_right is right, text
    report = from_command("torchrun --nproc-per-node 4 -m elsewhere.mine")
    assert report.is_right
    assert any("-m elsewhere.mine cannot be read here" in r for r in told(report, Severity.REMARK))
    report = from_command("V=megatron_ext.auto torchrun --nproc-per-node 4 -m elsewhere.mine")
    assert any("the environment names megatron_ext.auto" in r for r in told(report, Severity.RIGHT))


SIZES = {"num_layers": None, "hidden_size": None, "num_attention_heads": None}


@pytest.mark.parametrize(
    ("command", "script", "text"),
    [
        (
            "ray job submit -- python3 -m verl.trainer.main_ppo data.train_batch_size=256 "
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            None,
            "verl, whose settings are not Megatron's arguments; for a schedule of ours export "
            "VERL_USE_EXTERNAL_MODULES=megatron_ext.auto and MEGATRON_EXT_SCHEDULE=zb-v",
        ),
        (
            "python train_rl.py a.b=1 +c.d=2",
            "from verl.trainer import main_ppo",
            "VERL_USE_EXTERNAL_MODULES=megatron_ext.auto",
        ),
        (
            "torchrun --nproc-per-node 8 run_recipe.py --recipe llama3_8b train.train_iters=5",
            None,
            "Megatron-Bridge, whose settings are not Megatron's arguments; plan and doctor take "
            "the function that makes its config in place of the command, as MODULE:FUNCTION",
        ),
        (
            "torchrun --nproc-per-node 8 mine.py --steps 3",
            "from megatron.bridge.training.pretrain import pretrain",
            "in place of the command, as MODULE:FUNCTION",
        ),
        (
            "ray job submit -- python3 train.py --actor-num-nodes 1 --rollout-batch-size 32 "
            "--num-layers 36 --hidden-size 2560",
            None,
            "slime, whose settings are not Megatron's arguments",
        ),
        (
            "uv run run_grpo.py --config a.yaml policy.megatron_cfg.enabled=true",
            "from nemo_rl.algorithms.grpo import grpo_train",
            "a command of NeMo-RL",
        ),
        (
            "torchrun --nproc-per-node 8 mine.py --config a.yaml",
            "import torch",
            "mine.py is not known to train by Megatron's arguments, and the command has none",
        ),
    ],
)
def test_a_command_that_is_not_megatrons(
    command: str, script: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` says that a command is not one of Megatron's, such as verl's, and stops its check.
    It used to give verl's settings to Megatron's parser, and answered "Megatron asserts: assert
    args.micro_batch_size is not None", "correct it", with exit code 1."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    if script is not None:
        Path(read_launch(words).script).write_text(script)
    report = check_launch(read_launch(words), None, None)
    assert text in report.unchecked
    assert not any(f.subject in ("arguments", "flags", "datasets") for f in report.findings)
    result = CliRunner().invoke(app, ["doctor", "--", *words])
    assert result.exit_code == 2 and "the check stopped: " in result.output
    planned = CliRunner().invoke(app, ["plan", "--", *words])
    assert planned.exit_code == 2 and text in planned.stderr


def test_megatrons_own_command_without_sizes_is_checked() -> None:
    report = from_command(f"torchrun --nproc-per-node 4 {SCRIPT}", **SIZES)
    assert not report.unchecked and not report.is_right


def test_a_schedule_flag_of_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` recognizes that the script itself defines --pipeline-schedule. The flag used to be
    taken for ours. Under megatron_ext such a launch ends in argparse's traceback, so doctor reports
    the conflict."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("parser.add_argument('--pipeline-schedule', type=str)")
    report = from_command("torchrun --nproc-per-node 4 mine.py")
    assert report.is_right, told(report, Severity.WRONG)
    assert report.prediction is not None and report.prediction.schedule == "1f1b"
    assert any("--pipeline-schedule is the script's own" in r for r in told(report, Severity.RIGHT))
    (wrong,) = told(from_command("torchrun -m megatron_ext mine.py"), Severity.WRONG)[:1]
    conflict = "--pipeline-schedule: the script's parser has a flag of that name, and megatron_ext"
    assert conflict in wrong
    words = ["torchrun", "--nproc-per-node", "4", "mine.py", *model_flags(**FLAGS)]
    planned = CliRunner().invoke(app, ["plan", "--", *words])
    assert planned.exit_code == 2 and conflict in planned.stderr


def test_variables_count_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # MEGATRON_EXT_NIGHTLY is no setting of a run.
    monkeypatch.delenv("MEGATRON_EXT_NIGHTLY", raising=False)
    script = tmp_path / "mine.py"
    script.write_text("import megatron_ext.auto\n")
    launcher = f"MEGATRON_EXT_SCHEDULE=zb-h1 torchrun --nproc-per-node 4 {script}"
    report = from_command(launcher, pipeline_schedule=None)
    assert report.is_right, told(report, Severity.WRONG)
    assert report.prediction is not None and report.prediction.schedule == "zb-h1"
    assert "MEGATRON_EXT_SCHEDULE" not in os.environ
    report = from_command(launcher.replace("zb-h1", "zb-h9"), pipeline_schedule=None)
    assert any("zb-h9" in text for text in told(report, Severity.WRONG))

    launcher = (
        "MEGATRON_EXT_SCHEDULE=zb-h1 MEGATRON_EXT_MEMORY_LIMIT=1x torchrun --nproc-per-node 4"
    )
    report = from_command(f"{launcher} -m megatron_ext {SCRIPT}", pipeline_schedule=None)
    assert report.prediction is not None and report.prediction.schedule == "zb-h1"
    right = told(report, Severity.RIGHT)
    assert any("--pipeline-schedule zb-h1 --pipeline-memory-limit 1x" in text for text in right)
    report = from_command(f"{launcher} -m megatron_ext {SCRIPT}")
    assert report.prediction is not None and report.prediction.schedule == "zb-v"
    remarks = told(report, Severity.REMARK)
    assert any("zb-v counts, not MEGATRON_EXT_SCHEDULE=zb-h1" in text for text in remarks)
    report = from_command(f"{launcher} {SCRIPT}", pipeline_schedule=None)
    assert report.prediction is not None and report.prediction.schedule == "1f1b"
    remarks = told(report, Severity.REMARK)
    assert any("nothing in the command reads MEGATRON_EXT_SCHEDULE" in text for text in remarks)


def test_what_is_left_out_of_a_command_is_said() -> None:
    variable = "CUDA_DEVICE_MAX_CONNECTIONS=1"
    launcher = f"srun -w node1 env {variable} torchrun --nproc-per-node 8 -m megatron_ext"
    flags: dict[str, Any] = {"tensor_model_parallel_size": 2, "num_attention_heads": 4}
    report = from_command(f"{launcher} {SCRIPT} --log-interval '$EVERY'", **flags)
    remarks = told(report, Severity.REMARK)
    assert any("ignored, and not looked at: srun -w node1;" in text for text in remarks)
    assert any("nothing is expanded: '$EVERY' is taken as it stands" in text for text in remarks)
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in text for text in remarks)
    assert any(
        "set during the check: CUDA_DEVICE_MAX_CONNECTIONS" in text
        for text in told(report, Severity.RIGHT)
    )


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"fp8_format": "hybrid", "bf16": True, "transformer_impl": None},
            "fp8=hybrid: FP8's kernels are",
        ),
        ({"transformer_impl": None}, "Transformer Engine's own kernels are untried"),
        ({"inprocess_restart": True}, "untried with nvidia-resiliency-ext"),
    ],
)
def test_what_is_untried_is_said(overrides: dict[str, Any], text: str) -> None:
    """`doctor` remarks on features that are untried, such as FP8 kernels, if the command has a
    schedule of ours. It used not to mention them."""
    report = checked(**overrides)
    assert report.is_right, told(report, Severity.WRONG)
    assert any(t.startswith("untried: ") and text in t for t in told(report, Severity.REMARK))
    stock = checked(pipeline_schedule=None, **overrides)
    assert not any(t.startswith("untried: ") for t in told(stock, Severity.REMARK))


PACKED = {"sft": True, "no_create_attention_mask_in_dataloader": True, "null_tokenizer_pad_id": 0}


@pytest.mark.parametrize("overrides", [{}, PACKED, {**PACKED, "pipeline_vocab_parallel": 2}])
def test_a_tried_command_has_no_such_remark(overrides: dict[str, Any]) -> None:
    report = checked(**overrides)
    assert report.is_right, told(report, Severity.WRONG)
    assert not any(text.startswith("untried: ") for text in told(report, Severity.REMARK))


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--pipeline-shedule-memory-limit", "--pipeline-memory-limit"),
        ("--pipeline_schedul", "--pipeline-schedule"),
        ("--pipeline-offload", "--pipeline-activation-offload"),
        ("--pipline-trace-iters", "--pipeline-trace-iters"),
        ("--pipeline-model-parallel-siz", "--pipeline-model-parallel-size"),
    ],
)
def test_a_flag_like_one_of_ours_is_one_misspelt(word: str, meant: str) -> None:
    """`doctor` treats an unknown flag that resembles one of ours as misspelt, and names the right
    one. It used to call --pipeline-shedule-memory-limit "the script's own, perhaps"."""
    (wrong,) = told(checked(word, "4"), Severity.WRONG)
    assert wrong == f"flags: there is no flag {word}; did you mean {meant}?"


def test_helpers_that_cannot_be_compiled_are_reported_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` says before a launch that Megatron's dataset helpers cannot be compiled. Such a
    launch ran make after 50 s, found no pybind11, and ended on all ranks; doctor used to find
    nothing wrong."""
    about = "dataset helpers: "
    assert not [text for v in Severity for text in told(checked(), v) if text.startswith(about)]

    installed = {"pybind11"}
    compiled: list[Path] = []

    def find_spec(name: str) -> SimpleNamespace | None:
        if name.endswith("helpers_cpp"):
            return SimpleNamespace(origin=str(compiled[0])) if compiled else None
        there = name in installed or name == "megatron.core.datasets"
        return SimpleNamespace(origin=str(tmp_path / "__init__.py")) if there else None

    monkeypatch.setattr(dataset_helpers, "find_spec", find_spec)
    monkeypatch.setattr(dataset_helpers, "_HEADERS", ())
    monkeypatch.setattr(dataset_helpers.shutil, "which", lambda tool: f"/bin/{tool}")
    (without_makefile,) = told(checked(), Severity.WRONG)
    assert without_makefile.startswith(f"{about}helpers_cpp is not compiled in {tmp_path}")
    for name in ("Makefile", "helpers.cpp"):
        (tmp_path / name).touch()
    assert any(text.startswith(about) for text in told(checked(), Severity.RIGHT))
    installed.clear()
    (wrong,) = told(checked(), Severity.WRONG)
    assert "pybind11 is not installed: Megatron would end" in wrong
    assert f"make -C {tmp_path}" in wrong
    compiled.append(tmp_path / "helpers_cpp.so")
    compiled[0].touch()
    assert checked().is_right
    os.utime(compiled[0], (1, 1))  # the compiled file is older than its source
    assert not checked().is_right


def test_restarts_begin_where_a_checkpoint_is(tmp_path: Path) -> None:
    command = f"torchrun --nproc-per-node 4 --max-restarts 2 -m megatron_ext {SCRIPT}"

    def of_restarts(verdict: Severity, command: str = command, **overrides: object) -> list[str]:
        findings = told(from_command(command, **overrides), verdict)
        return [text for text in findings if text.startswith("restarts: ")]

    (text,) = of_restarts(Severity.REMARK)
    assert "without --save each begins at iteration 0" in text
    save: dict[str, Any] = {"save": tmp_path, "save_interval": 5}
    (text,) = of_restarts(Severity.REMARK, **save)
    assert (
        "each begins at iteration 0, not from what" in text and f"write --load {tmp_path}" in text
    )
    (text,) = of_restarts(Severity.RIGHT, **save, load=tmp_path)
    assert (
        f"up to 2, each with new processes on all ranks, from the last checkpoint in {tmp_path}"
        in text
    )
    assert of_restarts(
        Severity.RIGHT, command.replace("torchrun", "ft_launcher"), **save, load=tmp_path
    )
    assert not of_restarts(Severity.REMARK, command.replace("--max-restarts 2", ""))


def test_a_bare_doctor_runs_nothing_of_the_working_directory(tmp_path: Path) -> None:
    """`doctor` without a command imports nothing from the working directory unless PYTHONPATH names
    it, and says that there is a checkout of Megatron. It used to import the modules of any folder,
    a download's too."""
    fork = tmp_path / "megatron" / "core"
    fork.mkdir(parents=True)
    (fork / "__init__.py").write_text("raise RuntimeError('the fork is here')")
    program = "from megatron_ext.cli import app; app(['doctor', '--json'])"
    words = [sys.executable, "-P", "-c", program]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True)
    assert b"the fork is here" not in ran.stdout and ran.returncode == 0, ran.stderr
    assert b"not the one of this folder: PYTHONPATH=. megatron-ext doctor looks" in ran.stdout
    environment = {**os.environ, "PYTHONPATH": "."}
    ran = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True)
    assert b"the fork is here" in ran.stdout, ran.stderr


def test_datasets(tmp_path: Path) -> None:
    prefix = tmp_path / "text"
    Path(f"{prefix}.bin").write_bytes(b"12")
    Path(f"{prefix}.idx").write_bytes(b"MMIDIDX\x00\x00")
    data: dict[str, Any] = {"mock_data": None, "split": "99,1,0"}
    assert checked(**data, data_path=prefix).is_right
    (wrong,) = told(checked(**data, data_path=f"{prefix}.bin"), Severity.WRONG)
    assert "without .bin and .idx" in wrong
    (tmp_path / "list").write_text(f"0.3 {prefix} 0.7 {tmp_path}/other")
    (missing, _) = told(checked(**data, data_args_path=tmp_path / "list"), Severity.WRONG)
    assert f"there is no {tmp_path}/other.bin" in missing
    Path(f"{prefix}.idx").write_bytes(b"else")
    (wrong,) = told(checked(**data, data_path=prefix), Severity.WRONG)
    assert "is no index of Megatron's" in wrong


def test_checkpoints(tmp_path: Path) -> None:
    folders: dict[str, Any] = {"save": tmp_path, "load": tmp_path, "save_interval": 5}
    assert any("starts from scratch" in text for text in told(checked(**folders), Severity.REMARK))
    (wrong,) = told(checked(load=tmp_path), Severity.WRONG)
    assert "no latest_checkpointed_iteration.txt" in wrong
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    (tmp_path / "iter_0000010").mkdir()
    (wrong,) = told(checked(**folders), Severity.WRONG)
    assert "has no iter_0000020" in wrong and "there are: iter_0000010" in wrong
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(b"\xff\xfe\0" * 1000)
    # this file used to end doctor in a traceback
    (wrong,) = told(checked(**folders), Severity.WRONG)
    assert "which is no iteration" in wrong and len(wrong) < 500
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20\n")
    (tmp_path / "iter_0000020").mkdir()
    (wrong,) = told(checked(**folders), Severity.WRONG)
    assert "does not load: the checkpoint has no metadata.json" in wrong
    (tmp_path / "iter_0000020" / "mp_rank_00_000").mkdir()
    report = checked(**folders)
    assert report.is_right and any("GiB free" in text for text in told(report, Severity.RIGHT))
    assert any(
        "is not judged: the checkpoint is of format torch" in t
        for t in told(report, Severity.REMARK)
    )


def test_a_remote_checkpoint_is_not_looked_for() -> None:
    report = checked(load="msc://store/folder")
    assert report.is_right
    assert any("is remote, not looked for" in text for text in told(report, Severity.REMARK))


def test_a_full_disk_is_reported_before_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    (wrong,) = told(checked(save=tmp_path / "new", save_interval=5), Severity.WRONG)
    assert "a checkpoint takes about" in wrong and "make room" in wrong
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize("experts", [None, 2])
def test_ranks_share_the_model(untied: bool, experts: int | None) -> None:
    """The parameters that `doctor` counts on all ranks add up to the same total under every
    placement, and with a split vocabulary. The first and last stage also have learned positions and
    the final norm."""
    given: dict[str, Any] = FLAGS | {"untie_embeddings_and_output_weights": untied}
    given |= {"num_experts": experts, "pipeline_schedule": "1f1b"}
    config = megatron_arguments.PipelineConfig(schedule="1f1b")
    args = megatron_arguments.parse_arguments(model_flags(**given)).args
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, config, 4)
    args.padded_vocab_size = 128
    args.untie_embeddings_and_output_weights = untied

    def totals(placement: Placement, *way: VocabularyParallel) -> list[float]:
        counted = model_bytes_of_ranks(args, placement, *way)
        assert counted is not None
        return [rank.total for rank in counted]

    on_line, on_v = totals(line(4)), totals(v(4))
    divided = totals(v(4), VocabularyParallel.TWO)
    ends = 16 * args.hidden_size
    positions, norm = 16 * ends, 2 * ends
    tables = 2 if untied else 1
    assert divided[0] == divided[1] == divided[2] == divided[3] - positions - norm
    assert sum(divided) == sum(on_v) - (2 - tables) * 128 * ends
    assert sum(on_line) == sum(on_v)
    assert on_line[0] == on_line[3] + positions - norm > on_line[1] == on_line[2]
    assert on_v[3] > on_v[0] == on_v[1] == on_v[2]


def test_context_parallel_ranks_share_optimizer_states() -> None:
    """`doctor` splits optimizer states over context-parallel ranks too. It used to say that a
    Llama-3 70B with TP 4 and CP 2 takes 11 GiB more than it does."""
    given: dict[str, Any] = {"use_distributed_optimizer": True, "global_batch_size": 16}
    taken = []
    for context_ranks in (1, 2, 4):
        report = checked(
            world_size=16,
            context_parallel_size=context_ranks,
            transformer_impl="transformer_engine",
            **given,
        )
        assert report.prediction is not None, told(report, Severity.WRONG)
        taken.append([rank.model_bytes for rank in report.prediction.ranks])
    assert taken[0] == taken[1] == taken[2]


def test_the_command() -> None:
    line = ["--", str(SCRIPT), *model_flags(**FLAGS)]
    result = CliRunner().invoke(app, ["doctor", "--json", "--world-size", "4", *line])
    assert result.exit_code == 0 and json.loads(result.stdout)["right"], result.output
    result = CliRunner().invoke(app, ["doctor", *line, "--num-layer", "3"])
    assert result.exit_code == 1 and "did you mean --num-layers?" in result.output
    assert "to correct before the launch: 1" in result.output and "pipeline rank" in result.output
    result = CliRunner().invoke(app, ["doctor", "--", "pretrain", "--num-layers", "3"])
    assert result.exit_code == 2 and "begins no launch command" in result.output


def test_a_file_of_arguments(tmp_path: Path) -> None:
    """A file of Megatron's arguments is checked as a command with the same flags is. The number of
    ranks is the world_size in the file."""
    words = model_flags(**FLAGS | {"pipeline_schedule": None})
    values: dict[str, Any] = {"world_size": 8}
    for word, following in itertools.pairwise([*words, "--"]):
        if word.startswith("--"):
            name, is_switch = word[2:].replace("-", "_"), following.startswith("--")
            values[name] = True if is_switch else following
            with contextlib.suppress(ValueError):
                values[name] = values[name] if is_switch else json.loads(following)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    ours = ("--pipeline-schedule", "zb-v")
    by_file = CliRunner().invoke(app, ["doctor", "--json", str(path), *ours])
    line = ("torchrun", "--nproc-per-node", "8", "-m", "megatron_ext", str(SCRIPT), *words, *ours)
    by_words = CliRunner().invoke(app, ["doctor", "--json", "--", *line])
    found, expected = json.loads(by_file.output), json.loads(by_words.output)
    assert by_file.exit_code == by_words.exit_code == 0 and found["right"], by_file.output
    assert found["prediction"] == expected["prediction"]
    assert found["prediction"]["schedule"] == "zb-v" and found["prediction"]["microbatches"] == 4
    remarks = [one["text"] for one in found["findings"] if one["subject"] == "arguments file"]
    assert remarks == [f"read from {path}: the script is not in it, pretrain_gpt.py is assumed"]
    path.write_text(json.dumps({**values, "num_layer": 3}))
    result = CliRunner().invoke(app, ["doctor", str(path)])
    assert result.exit_code == 2
    assert result.output.startswith(f"megatron-ext: error: {path}: Megatron has no argument")
    assert "did you mean num_layers?" in result.output


def test_json_has_no_lines_of_a_trainings_log() -> None:
    """`doctor --json` prints nothing before its JSON. If the vocabulary is padded, as 32,000 over
    three ranks, a training logs a line; this line used to be printed before the JSON of doctor, and
    more than a hundred such lines before that of plan."""
    flags = model_flags(
        **FLAGS | {"pipeline_model_parallel_size": 3, "num_layers": 6, "vocab_size": 32000},
        pipeline_vocab_parallel=1,
        make_vocab_size_divisible_by=128,
    )
    result = CliRunner().invoke(app, ["doctor", "--json", "--", str(SCRIPT), *flags])
    findings = json.loads(result.stdout)["findings"]
    assert "NullTokenizer loads, 32256 tokens padded" in {found["text"] for found in findings}


def test_what_is_assumed_of_a_gpu_is_said() -> None:
    report = checked(tensor_model_parallel_size=2)
    remarks = told(report, Severity.REMARK)
    assert any("compute capability 9.0 is assumed" in text for text in remarks)
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in text for text in remarks)
    assert report.is_right


def test_the_bytes_of_a_trace_are_predicted(tmp_path: Path) -> None:
    """`doctor` predicts the size of a trace in bytes. A trace of all iterations of a training fills
    its disk, and no browser can show it."""
    trace: dict[str, Any] = {"pipeline_schedule": "zb-h1", "pipeline_trace": tmp_path}

    def told_of(first: int, stop: int, train_iters: int, verdict: Severity) -> str:
        iters = f"{first}:{stop}"
        report = checked(**trace, pipeline_trace_iters=iters, train_iters=train_iters)
        (text,) = [text for text in told(report, verdict) if text.startswith("trace: about ")]
        return text

    assert f"in {tmp_path}, for 2 iterations" in told_of(2, 4, 20, Severity.RIGHT)
    text = told_of(2, 1_000_000, 9_999_999, Severity.REMARK)
    assert "for 999998 iterations, and no more than 1 GiB are written" in text
    assert "write --pipeline-trace-iters A:B with fewer iterations" in text
