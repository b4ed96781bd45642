"""Tests that `doctor`, `plan` and the launch refuse a command with the same sentence, in the same
order of checks.

The launch used to have another order of checks, so of two mistakes in a command it named another
one than doctor. Only the launch used to switch off Megatron's settings that a schedule handles
itself, such as offload: doctor and plan refused commands with these settings.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.training import arguments as megatron

from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.importing import silently
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.training import arguments
from megatron_ext.written_settings import from_argv
from tests.helpers.combinations import at_night
from tests.patches.launch.test_one_judgement import Flags, by_doctor, launch_of, plan_of

RANKS = 8
# Mistakes of a launch, sorted as doctor reports them: the subject of each in the report, wrong
# flags that make it, and words of the reason.
MISTAKES: tuple[tuple[str, Flags, str], ...] = (
    ("counts", {"micro_batch_size": 0}, "--micro-batch-size 0"),
    ("sizes", {"num_query_groups": 3, "group_query_attention": True}, "--num-query-groups 3"),
    ("tokenizer", {"pipeline_vocab_parallel": 1, "padded_vocab_size": 65602}, "65602"),
    ("microbatches", {"pipeline_microbatch_order": "small-ends"}, "all microbatches cost the same"),
    ("batch size", {"global_batch_size": 31, "eval_global_batch_size": 16}, "(31)"),
    ("settings", {"pipeline_trace": "traces", "pipeline_trace_iters": "7:9"}, "iteration 8"),
    ("stages", {"num_layers": 18}, "18 layers"),
    ("limit", {"pipeline_memory_limit": "1MiB"}, "memory limit"),
    ("training", {"eval_interval": None}, "--eval-interval"),
)


def by_launch(ranks: int, flags: Flags, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the reason for which a rank of the launch ends before any process group exists, or
    ""."""
    words = launch_of(ranks, flags).arguments
    args, config = megatron_arguments.parse_arguments(words).args, from_argv(words)
    args.rank, args.world_size = 0, ranks
    capsys.readouterr()
    try:
        with silently(), megatron_arguments.on_gpus(args), apply(arguments.patches(config)):
            megatron.validate_args(args)
    except SystemExit as ended:
        assert ended.code == 2
        return capsys.readouterr().err.partition("error: ")[2].strip()
    return ""


@pytest.fixture(autouse=True)
def login_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)


def commands() -> list[Any]:
    """Return pairs of mistakes: each mistake with the next one, at night with all later ones."""
    pairs = list(combinations(range(len(MISTAKES)), 2))
    by_day = [(first, second) for first, second in pairs if second == first + 1]
    return [*by_day, *at_night(*(pair for pair in pairs if pair not in by_day))]


@pytest.mark.parametrize("mistakes", commands(), ids=str)
def test_the_first_reason_is_the_same(
    mistakes: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    flags: Flags = {"pipeline_schedule": "zb-v"}
    for number in mistakes:
        flags |= MISTAKES[number][1]
    subject, _, word = MISTAKES[mistakes[0]]
    first, *_ = by_doctor(launch_of(RANKS, flags)).whys
    assert word in first
    assert plan_of(launch_of(RANKS, flags)).whys == (first,)
    # Megatron checks the length of the training after the model is set up
    if subject != "training":
        assert by_launch(RANKS, flags, capsys) == first


_OFFLOAD: Flags = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)}


@pytest.mark.parametrize(
    "flags",
    [{"delay_wgrad_compute": True}, _OFFLOAD, *at_night(_OFFLOAD | {"pipeline_memory_limit": "4"})],
    ids=str,
)
def test_what_the_schedule_implements_is_accepted(
    flags: Flags, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Megatron requires this variable for its own offload
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    ours = {"pipeline_schedule": "zb-v", "transformer_impl": "transformer_engine"}
    flags = ours | flags
    launch = launch_of(RANKS, flags)
    answer = by_doctor(launch)
    assert not answer.whys and answer.ranks
    assert plan_of(launch) == answer
    assert by_launch(RANKS, flags, capsys) == ""
    if flags.items() >= _OFFLOAD.items() and "pipeline_memory_limit" not in flags:
        offload = {"pipeline_activation_offload": "full"}
        assert by_doctor(launch_of(RANKS, ours | offload)) == answer


@pytest.mark.parametrize(("log_interval", "is_told"), [(1, True), (10, False)])
def test_steps_that_cannot_overlap_are_remarked_on(
    log_interval: int,
    is_told: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`doctor` remarks that steps cannot overlap under --log-interval 1, as the launch does. It
    used not to."""
    told: list[str] = []
    monkeypatch.setattr(arguments.logger, "warning", told.append)
    flags: Flags = {
        "pipeline_schedule": "zb-2p",
        "pipeline_post_validation": True,
        "pipeline_costs": "f=10,i=10,w=10",
    }
    flags |= {"log_interval": log_interval, "rerun_mode": "disabled"}
    assert by_launch(RANKS, flags, capsys) == ""
    assert len(told) == is_told and all(text.startswith("with --log-interval 1") for text in told)
    findings = check_launch(launch_of(RANKS, flags), None, None).findings
    assert [finding.text for finding in findings if finding.subject == "post-validation"] == told


def test_a_launch_reads_the_weights_of_samples_first(capsys: pytest.CaptureFixture[str]) -> None:
    """A launch with an unreadable file of microbatch weights ends with doctor's sentence before it
    starts. It used to end with a traceback on each rank when it read its data, although doctor had
    named the file."""
    flags: Flags = {"pipeline_microbatch_order": "small-ends"}
    flags |= {"pipeline_microbatch_weights": "weights.npy"}
    (why,) = by_doctor(launch_of(RANKS, flags)).whys
    assert why.startswith(
        "--pipeline-microbatch-weights weights.npy cannot be read as a numpy array: "
    )
    assert by_launch(RANKS, flags, capsys) == why
    assert plan_of(launch_of(RANKS, flags)).ranks, "a plan does not need the file"
