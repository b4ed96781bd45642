"""Doctor, plan and the launch refuse a command with the same sentence, in the same order.

The launch had an order of its own: of a command with two mistakes it named another one first.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.training import arguments as megatron

from megatron_ext.launch_command import megatron_arguments
from megatron_ext.launch_command.importing import silently
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.training.arguments import patches
from megatron_ext.written_settings import from_argv
from tests.helpers.combinations import at_night
from tests.patches.test_one_judgement import Flags, by_doctor, launch_of, plan_of

RANKS = 8
# By subject of doctor's report, in order: flags that are wrong, and a word of the reason.
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
    """Return the reason for which a rank of the launch ends before any process group exists; "" if
    it does not."""
    words = launch_of(ranks, flags).arguments
    args, config = megatron_arguments.parse_arguments(words).args, from_argv(words)
    args.rank, args.world_size = 0, ranks
    capsys.readouterr()
    try:
        with silently(), megatron_arguments.on_gpus(args), apply(patches(config)):
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
    """Return each mistake with the next one, at night with every later one."""
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
    if subject != "training":  # Megatron checks it after the set-up of the model
        assert by_launch(RANKS, flags, capsys) == first
