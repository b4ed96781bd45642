"""Tests of `plan` and `doctor` on a log: they read a launch from the arguments that Megatron
printed in it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.training import arguments
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.importing import silently
from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.command.log.log_figures import AllocatedBytes, LogFigures
from megatron_ext.launch.command.log.megatron_log import launch_from_log, read_log
from megatron_ext.launch.command.log.unparse import unparse, unparsed_flags
from megatron_ext.launch.planner import launch_job, parsed_launch
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, with_launch
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.written_settings import from_argv
from tests.helpers.combinations import nightly
from tests.helpers.few_families import only_families
from tests.helpers.limited import run_limited
from tests.helpers.megatron_runs import EXPERTS, SCRIPT, model_flags, train

BEGIN = "------------------------ arguments ------------------------"
END = "-------------------- end of arguments ---------------------"

LARGE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 1024,
    "max_position_embeddings": 2048,
    "bf16": True,
    "use_distributed_optimizer": True,
    "transformer_impl": "transformer_engine",
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 16,
}
MLA: dict[str, Any] = {
    **{"multi_latent_attention": True, "q_lora_rank": 512, "kv_lora_rank": 256},
    **{"qk_head_dim": 64, "qk_pos_emb_head_dim": 32, "v_head_dim": 64, "mtp_num_layers": 1},
}
LAUNCHES: dict[str, dict[str, Any]] = {
    "a small GPT": {"global_batch_size": 16},
    "virtual stages": LARGE | {"num_virtual_stages_per_pipeline_rank": 2},
    "our stages": LARGE | {"pipeline_schedule": "zb-v", "pipeline_memory_limit": "0.5x"},
    "tensor parallel": LARGE | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "context parallel": LARGE | {"context_parallel_size": 2, "cp_comm_type": "a2a"},
    "experts": LARGE
    | EXPERTS
    | {"expert_model_parallel_size": 2, "moe_layer_freq": "([0]*1+[1]*7)", "num_query_groups": 4}
    | {"group_query_attention": True, "moe_grouped_gemm": True},
    "a layout": LARGE | MLA | {"pipeline_model_parallel_layout": "Ett|tt|tt|ttmL"},
    "recompute": LARGE
    | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    | {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.1},
    "recomputed modules": LARGE
    | {"recompute_activations": True, "recompute_modules": ("core_attn", "layernorm")},
    "8 bits": LARGE
    | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
    "types of states": LARGE
    | {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16", "exp_avg_dtype": "fp8"},
    "graphs": LARGE
    | {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ("attn", "mlp")},
    "half precision": LARGE | {"bf16": None, "fp16": True, "attention_backend": "flash"},
    "windows": LARGE | {"window_size": "128,0", "window_attn_skip_freq": 4, "min_lr": -1.0},
    "muon": LARGE | {"optimizer": "muon"},
    "data": LARGE
    | {"mock_data": None, "data_path": ("0.3", "/a b/c", "0.7", "/d"), "split": "99,1,0"}
    | {"rampup_batch_size": ("8", "8", "100"), "no_rope_freq": "[0,1,1,1]*2"},
    "a hybrid": LARGE
    | {"hybrid_layer_pattern": "M*M*|M*M*|M*M*|M*M*", "num_layers": None, "is_hybrid_model": True},
}


def block(*entries: str, **values: object) -> str:
    """Return a block of arguments as Megatron prints it."""
    values = {"world_size": 8, "num_layers": 4} | values
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in values.items()]
    return "\n".join([BEGIN, *lines, *entries, END, ""])


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a login node without a GPU, whatever the machine of the test has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def validated(words: tuple[str, ...], ranks: int) -> dict[str, Any]:
    """Return the arguments that Megatron's validation makes of a command line."""
    args = megatron_arguments.parse_arguments(words).args
    with silently(), megatron_arguments.on_gpus(args):
        return vars(megatron_arguments.validate(args, from_argv(words), ranks))


def printed(words: list[str], ranks: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the block of arguments that Megatron's own code prints of a training."""
    args = validated(tuple(words), ranks)
    capsys.readouterr()
    arguments._print_args("arguments", megatron_arguments.SimpleNamespace(**args))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", LAUNCHES)
def test_flags_of_printed_arguments_give_them_again(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = model_flags(**LAUNCHES[name])
    block = printed(words, 16, capsys)
    unparsed = unparse(read_log(block.splitlines()).arguments)
    assert unparsed.differences == () and unparsed.unknown == ()
    again, first = validated(unparsed.words, 16), validated(tuple(words), 16)
    # The unparsed command writes this flag explicitly.
    told = "_is_global_batch_size_explicitly_specified"
    assert {**again, told: None, "rank": 0} == {**first, told: None, "rank": 0}
    assert len(unparsed.words) <= len(words) + 15, unparsed.words  # defaults are not written


def log_of(lines: str, tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(lines)
    return path


def test_a_line_of_a_log_may_have_a_rank_or_a_time_before_it() -> None:
    expected = {"world_size": "8", "num_layers": "4", "save": "/a  b .. c", "split": ""}
    text = block("and a line of somebody else's", save="/a  b .. c", split="")
    assert read_log(text.splitlines()).arguments == expected
    for before in (
        "[rank0]:",
        "0: ",
        " 3: [default3]:",
        "2026-11-25 23:30:25 ",
        "[2026-11-25 23:30:25,123] [INFO] ",
        "\x1b[36m(Worker pid=12)\x1b[0m ",
    ):
        log = read_log(f"{before}{line}\r\n" for line in text.splitlines())
        assert log.arguments == expected, before
        assert log.different == ()


def test_blanks_at_the_end_of_a_line_are_no_part_of_a_value() -> None:
    """Blanks at the end of a log's line do not belong to the value. Lines that are copied from a
    terminal are padded, so `bf16` used to be "True  ", and `doctor` and `plan` judged a training
    without bf16."""
    padded = [line.ljust(80) for line in block(bf16=True, swiglu=False).splitlines()]
    log = read_log(padded)
    assert log.arguments == {
        "world_size": "8",
        "num_layers": "4",
        "bf16": "True",
        "swiglu": "False",
    }


def test_the_first_whole_block_counts_and_others_are_compared() -> None:
    first, second = block(num_layers=4, lr=0.1), block(num_layers=6, lr=0.1)
    cut = "\n".join(block(num_layers=5).splitlines()[:2])
    log = read_log("\n".join([cut, first, "training ...", second]).splitlines())
    assert log.arguments["num_layers"] == "4" and log.different == ("num_layers",)
    assert read_log((first + first).splitlines()).different == ()

    def of(rank: int, text: str) -> list[str]:
        return [f"[rank{rank}]:{line}" for line in text.splitlines()]

    interleaved = zip(of(3, second), of(0, first), strict=True)
    log = read_log(line for lines in interleaved for line in lines)
    assert log.arguments["num_layers"] == "6" and log.different == ("num_layers",)


def test_gpus_are_those_that_the_log_names() -> None:
    text = f"nproc_per_node   : 4\nGPU 0: NVIDIA H200 (UUID: 1)\nNVIDIA Release 25.04\n{block()}"
    log = read_log(text.splitlines())
    assert (log.of_node, log.gpu) == (4, "h200")
    log = read_log(f"NVIDIA H100 80GB HBM3\nNVIDIA A100-SXM4-80GB\n{block()}".splitlines())
    assert (log.of_node, log.gpu) == (None, None)
    for driver, name in (
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA GH200 144G HBM3e", "gh200-144"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L40S", "l40s"),
    ):
        assert read_log(f"{driver}\n{block()}".splitlines()).gpu == name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("loading ...\n", "the log has none of the arguments"),
        (f"{BEGIN}\n  lr {'.' * 46} 1.0\n", "cut off after lr: the line '---- end of arguments"),
        (f"{BEGIN}\n{END}\n", "no number as world_size (0 arguments read)"),
        (block(num_layers="x"), "does not accept the log's arguments: argument --num-layers:"),
        (block(data_path="['a', <b>]"), "data_path ['a', <b>] cannot be read as a list"),
    ],
)
def test_a_log_without_arguments_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = log_of(text, tmp_path)
    with pytest.raises(ValueError) as error:
        launch_from_log(path)
    assert str(error.value).startswith(f"log {path}: ") and why in str(error.value)


PROGRAM = "open('HAS_RUN', 'w').close()"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("schedule", "mine.py"),
        ("schedule", "mine.py:depth=2"),
        ("schedule", "my own .py"),
        ("schedule", "[mine .py"),
        ("race", "zb-h1 mine.py"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_log_runs_no_schedule(
    setting: str, text: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a log does not run a Python schedule that the log names; `plan` and `doctor` say how
    to write the flag. The file used to be executed, although anybody may have written the log."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "my own .py", "[mine .py", "[mine.py"):
        (tmp_path / name).write_text(PROGRAM)
    path = log_of(block(**{f"pipeline_{setting}": text}), tmp_path)
    ended = CliRunner().invoke(app, [command, str(path)])
    assert ended.exit_code == 2 and not (tmp_path / "HAS_RUN").exists(), ended.output
    assert f"log {path}: the log has --pipeline-{setting} {text}" in ended.output
    assert f"{path} --pipeline-{setting} {shlex.quote(text)}" in ended.output


def test_the_command_line_names_a_logs_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags of ours after the log's name count in place of those in the log, so the user can name a
    Python schedule that the log cannot."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PROGRAM)
    values = {"pipeline_schedule": "other.py", "pipeline_memory_limit": "0.5x"}
    path = log_of(block(**values), tmp_path)
    command = ["doctor", str(path), "--pipeline-schedule", "mine.py"]
    ended = CliRunner().invoke(app, command)
    assert (tmp_path / "HAS_RUN").exists(), ended.output
    words = launch_from_log(path, {"schedule": "mine.py"}).arguments
    assert words[-4:] == (*command[2:], "--pipeline-memory-limit", "0.5x")
    ended = CliRunner().invoke(app, [*command, "--lr", "1"])
    assert ended.exit_code == 2 and "No such option: --lr" in ended.output
    ended = CliRunner().invoke(app, [*command, "--overlap-moe-expert-parallel-comm"])
    assert "since Megatron's own arguments are read from the log" in ended.output


def test_a_list_of_a_log_has_no_flags(tmp_path: Path) -> None:
    """A list in a log is refused if an item would be read as a flag. Items used to become words of
    the command line, and so could add a flag, for example one that names a Python file as the
    schedule."""
    for items in (["a", "--pipeline-schedule", "mine.py"], ["-h"], ["1", "--"]):
        with pytest.raises(ValueError, match="cannot be read as a list"):
            launch_from_log(log_of(block(data_path=items), tmp_path))
    words = launch_from_log(log_of(block(data_path=["-1", "a-b"]), tmp_path)).arguments
    assert words[-3:] == ("--data-path", "-1", "a-b")


@nightly("test_launch_check.py starts doctor in a folder with a fork of Megatron, without a log")
def test_a_log_imports_nothing_that_lies_around(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Reading a log imports no module of the working directory. That directory used to come first
    on the module path, as it does for a launch command, whose ranks import from there."""
    evil = "raise SystemExit('code of the working directory runs')"
    for module in ("megatron/core/__init__.py", "layers.py", "wandb.py", "apex.py", "numba.py"):
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text(evil)
    log_of(printed(model_flags(**LARGE, spec=("layers", "own")), 16, capsys), tmp_path)
    program = "from megatron_ext.cli import app; app(['doctor', 'train.log'])"
    words = [sys.executable, "-P", "-c", program]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and "nothing is wrong" in ran.stdout, ran.stdout + ran.stderr
    assert "--spec layers own" in ran.stdout and "code of the working" not in ran.stdout


def test_a_log_may_be_larger_than_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`doctor` reads a log that is larger than memory. A line without an end used to be read whole,
    and the argument blocks of all starts in the log were stored."""
    text = printed(model_flags(**LARGE), 16, capsys)
    path = tmp_path / "train.log"
    with path.open("w") as log:
        log.seek(2**28)
        log.write(f"nproc-per-node: 4\n{text}")
        for start in range(40):
            log.write(text.replace("  lr ...", f"  lr{start:02} ."))
        log.truncate(2**29)
    ended = run_limited(["doctor", "--json", path.name], tmp_path)
    assert ended.status == 0 and "16 ranks, 4 on each node (as the log says)" in ended.output, ended
    assert "the first are taken: lr, lr00, lr01 and 38 more" in ended.output
    assert ended.grown < 2**28, ended


@pytest.mark.parametrize(
    "text",
    ["[9**9**9]", "[1]*999999999", "([0]*9999)*9999", "([0]*3", "[1](2)", "[" * 500, "[1.5]"],
)
def test_a_list_that_takes_long_is_refused(text: str, tmp_path: Path) -> None:
    """A list in a flag or a log is refused if evaluating it would take long. Megatron evaluates its
    lists as Python: a power such as 9**9**9 used to take all memory, and a value that is no list
    ended in a traceback."""
    for words in (["--moe-layer-freq", text], [f"--window-attn-skip-freq={text}"]):
        with pytest.raises(ValueError, match=r"argument --.*-freq: .* does not give a list"):
            megatron_arguments.parse_arguments(words)
    with pytest.raises(ValueError, match=r"moe_layer_freq .* does not give a list"):
        megatron_arguments.parse_values({"moe_layer_freq": text})
    with pytest.raises(ValueError, match=r"log .*train.log: .* does not give a list"):
        launch_from_log(log_of(block(moe_layer_freq=text), tmp_path))


def test_a_list_of_megatrons_is_what_megatron_makes_of_it() -> None:
    for text in ("([0]*1+[1]*2)*3", "[1,0]", "2*[1]", "[0]+[1]*(2+3*4)", "[]", "[[1]]*2"):
        args = megatron_arguments.parse_arguments(["--moe-layer-freq", text]).args
        assert args.moe_layer_freq == eval(text)
    assert megatron_arguments.parse_arguments(["--moe-layer-freq", "3"]).args.moe_layer_freq == 3


@pytest.mark.parametrize("is_log", [True, False])
def test_a_log_runs_no_code_of_a_tokenizer(
    is_log: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a log runs no code of a tokenizer (trust_remote_code). A tokenizer that a log names
    used to run its own code if the log has trust_remote_code."""
    allowed = []

    def build(args: Any) -> None:
        allowed.append(args.trust_remote_code)
        raise ValueError

    monkeypatch.setattr(megatron_arguments, "build_tokenizer", build)
    flags = model_flags(**LARGE, trust_remote_code=True)
    launch = read_launch(["torchrun", "--nproc-per-node", "16", SCRIPT.name, *flags])
    if is_log:
        launch = replace(launch, log=tmp_path)
    with_launch(LaunchRequest(launch), lambda parsed: None)
    assert allowed == [not is_log]


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_log_that_cannot_be_taken_ends_the_command(command: str, tmp_path: Path) -> None:
    path = tmp_path / "none.log"
    ended = CliRunner().invoke(app, [command, str(path)])
    assert ended.exit_code == 2
    assert f"log {path}: No such file or directory" in ended.output
    ended = CliRunner().invoke(app, [command, str(path), "--", "torchrun", "x.py"])
    assert ended.exit_code == 2 and "are two jobs: give only one of the two" in ended.output


def test_the_vocabulary_is_that_of_the_tokenizers_line(tmp_path: Path) -> None:
    """The size of the vocabulary is read from the log's line about the tokenizer, because Megatron
    knows the size only after it has printed the arguments."""
    told = " > padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)"
    words = launch_from_log(log_of(f"{block()}{told}\n", tmp_path)).arguments
    assert words[-2:] == ("--padded-vocab-size", "50304")
    words = launch_from_log(log_of(f"{block(padded_vocab_size=64)}{told}\n", tmp_path)).arguments
    assert words[-2:] == ("--padded-vocab-size", "64")


def test_a_name_that_is_a_flag_today_is_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An argument in a log whose name is a flag today is written as that flag. Older versions of
    Megatron print norm_epsilon, which used to be ignored, so the written command trained another
    model. Today --norm-epsilon sets layernorm_epsilon."""
    names = {"hidden_size": "64", "norm_epsilon": "1e-06", "no_such_name": "3"}
    words = unparsed_flags(names)
    assert words[words.index("--norm-epsilon") + 1] == "1e-06"
    default = unparsed_flags(names | {"norm_epsilon": "1e-05"})
    assert "--norm-epsilon" not in default, "a default is not written"
    both = unparsed_flags(names | {"layernorm_epsilon": "1e-07"})
    assert both[both.index("--norm-epsilon") + 1] == "1e-07" and "1e-06" not in both
    text = printed(model_flags(global_batch_size=16), 8, capsys)
    old = re.sub(r"  layernorm_epsilon (\.+) 1e-05", r"  norm_epsilon .....\1 1e-06", text)
    assert old != text
    launch = launch_from_log(log_of(old, tmp_path))
    assert launch.arguments[launch.arguments.index("--norm-epsilon") + 1] == "1e-06"
    assert len(launch.remarks) == 1, launch.remarks


ITERATION = (
    "[2026-01-01 10:00:00] iteration {:8d}/     100 | consumed samples: 64 | elapsed time per "
    "iteration ({}): {} | learning rate: 1.0E-04 | global batch size: 64 |\n"
)
MEMORY = (
    "[Rank {}] (after 2 iterations) memory (MB) | allocated: {} | max allocated: {} | reserved: "
    "4000.0 | max reserved: 4000.0\n"
)


def test_figures_of_a_log() -> None:
    lines = [
        *block().splitlines(keepends=True),
        ITERATION.format(1, "ms", 90000.0),
        *(ITERATION.format(i, "ms", ms) for i, ms in ((2, 2000.0), (3, 2100.0), (4, 9000.0))),
        "[default7]:" + MEMORY.format(7, 100.5, 300),
        MEMORY.format(0, 200, 250.25),
        MEMORY.format(0, 300, "1.2.3"),
    ]
    figures = read_log(lines).figures
    assert figures.seconds == 2.1, "the median without the first one"
    assert figures.ranks[7] == AllocatedBytes(100.5 * 2**20, 300 * 2**20)
    assert figures.ranks[0] == AllocatedBytes(300 * 2**20, 0)
    assert read_log([*lines[:4], ITERATION.format(1, "s", 3.5)]).figures.seconds == 3.5
    assert read_log(block().splitlines()).figures == LogFigures()


def test_a_plan_compares_its_estimate_with_the_log(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` compares its estimate with the step time and memory in the log. The log has 423 s a
    step and 58.9 GiB. The plan used to say 165 s, and not to mention the log's step time and
    memory."""
    only_families(monkeypatch, "1f1b")
    monkeypatch.setattr(parsed_launch, "_METHODS", frozenset([VocabMethod.NAIVE]))
    monkeypatch.setattr(launch_job, "_layouts", lambda read: None)
    text = printed(model_flags(**LARGE), 8, capsys)
    text = re.sub(r"  eval_interval .*\n", "", text)  # as in a log that was shortened
    measured = ITERATION.format(2, "ms", 4230.0) + MEMORY.format(4, 600, 700)
    path = log_of(text + measured, tmp_path)
    result = CliRunner().invoke(app, ["plan", "--gpu", "mi300x", str(path)])
    assert result.exit_code == 0, result.output
    (line,) = (row for row in result.stdout.splitlines() if row.startswith("measured in the log:"))
    assert re.fullmatch(
        r"measured in the log: 4.23 s a step \([\d.]+ s estimated\); rank 4 held 0.586 GiB "
        r"\([\d.]+ GiB estimated\) after a step and 0.684 GiB \([\d.]+ GiB estimated\) at the most",
        line,
    ), line
    json_form = ["plan", "--json", "--gpu", "mi300x", str(path)]
    assert line in json.loads(CliRunner().invoke(app, json_form).stdout)["remarks"]


def test_arguments_that_flags_do_not_give_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`plan` of a log names arguments that flags cannot reproduce. The log here is another
    Megatron's: it has an unknown argument, and a derived value that this Megatron computes
    differently."""
    text = printed(model_flags(global_batch_size=16), 8, capsys)
    dots = "." * (48 - len("data_parallel_size"))
    assert f"  data_parallel_size {dots} 8\n" in text
    text = text.replace(f"  data_parallel_size {dots} 8\n", f"  data_parallel_size {dots} 4\n")
    launch = launch_from_log(log_of(text.replace(END, f"  warp {'.' * 44} 9\n{END}"), tmp_path))
    assert launch.world_size == 8
    assert launch.remarks[1:] == (
        "this Megatron does not know, and they are ignored: warp",
        "data_parallel_size is 4 in the log and 8 by its flags here",
    )


def test_a_training_is_checked_by_its_log(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A launch that is read from the log of a real training has the arguments of its launch
    command."""
    sizes = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"}
    words = model_flags(**sizes, train_iters=1, transformer_impl="local")
    capfd.readouterr()
    train(2, words)
    path = log_of(capfd.readouterr().out, tmp_path)
    launch = launch_from_log(path)
    assert launch.world_size == 2 and launch.installs
    assert launch.remarks == (
        f"read from {path}: 2 ranks, 2 on each node (assumed); the script is not in it, "
        f"pretrain_gpt.py is assumed",
    )
    command = ["doctor", "--json", "--world-size", "2"]
    by_log = CliRunner().invoke(app, [*command, str(path)])
    by_words = CliRunner().invoke(app, [*command, "--", "-m", "megatron_ext", SCRIPT.name, *words])
    found, expected = json.loads(by_log.output), json.loads(by_words.output)
    assert found["prediction"] == expected["prediction"]
    assert found["prediction"]["schedule"] == "zb-v"
    assert by_log.exit_code == 0, by_log.output


def test_a_log_is_planned_as_its_launch_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_families(monkeypatch, "1f1b", "zb-h1")
    monkeypatch.setattr(parsed_launch, "_METHODS", frozenset([VocabMethod.NAIVE]))
    monkeypatch.setattr(launch_job, "_layouts", lambda read: None)
    words = model_flags(**LARGE)
    path = log_of(f"GPU 0: NVIDIA H200\n{printed(words, 16, capsys)}", tmp_path)
    command = ["plan", "--json"]
    by_log = CliRunner().invoke(app, [*command, str(path)])
    line = ["torchrun", "--nnodes", "2", "--nproc-per-node", "8", SCRIPT.name, *words]
    by_words = CliRunner().invoke(app, [*command, "--gpu", "h200", "--", *line])
    found, expected = json.loads(by_log.stdout), json.loads(by_words.stdout)
    remarks = found.pop("remarks")
    assert remarks[:2] == [
        f"read from {path}: 16 ranks, 8 on each node (assumed); the script is not in it, "
        f"pretrain_gpt.py is assumed",
        "the log names the GPU: h200",
    ]
    *others, missing = expected.pop("remarks")
    # a log does not say which script was run
    assert remarks[2:] == others and "not on this machine" in missing
    assert expected.pop("command").startswith("torchrun --nnodes 2 ")
    assert found.pop("command").startswith("-m megatron_ext pretrain_gpt.py ")
    assert found == expected
