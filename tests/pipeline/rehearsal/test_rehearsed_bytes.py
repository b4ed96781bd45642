"""Tests that a rank that is rehearsed alone stores exactly as many bytes as in the whole training,
and runs the same program."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron_ext.adapter import programs
from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.planner.parsed_launch import LaunchRequest
from megatron_ext.rehearsal.prepare import ESTIMATE, prepare
from megatron_ext.rehearsal.rank_command import words_alone
from tests.helpers import context_parallel
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.live_bytes import CountedStep, count_bytes, counted
from tests.helpers.megatron_runs import SCRIPT, model_flags, train
from tests.helpers.ranks import run_ranks, values
from tests.helpers.rehearsals import rehearsed
from tests.helpers.short_search import shorten_search
from tests.helpers.storages import LiveStorages

RANKS = 4
COSTS = "f=1,i=1,w=1,d2h=1,h2d=1"
STOCKS_LOOP = {"num_virtual_stages_per_pipeline_rank": 2}


def flags(spec: str | None, **overrides: object) -> list[str]:
    return model_flags(
        **{
            "pipeline_model_parallel_size": RANKS,
            "num_layers": 16,
            "global_batch_size": 8,
            "train_iters": 3,
            "rerun_mode": "disabled",
            "pipeline_schedule": spec,
            "pipeline_costs": None if spec is None else COSTS,
            **overrides,
        }
    )


def among_others(words: list[str], ranks: range) -> list[CountedStep]:
    """Return the byte counts of the second steps of ``ranks``, in a training of all ranks."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        count_bytes(patch, Path(folder))
        train(RANKS, words)
        return counted(Path(folder), ranks)


def alone(words: Sequence[str], ranks: range) -> list[CountedStep]:
    """Return the byte counts of the second steps of ``ranks``, each rehearsed without the other
    ranks."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        count_bytes(patch, Path(folder))
        for rank in ranks:
            record = rehearsed(rank, RANKS, words)
            assert (record.trained, record.pipeline_rank) == (2, rank)
        return counted(Path(folder), ranks)


@pytest.mark.parametrize(
    ("spec", "overrides"),
    [
        ("zb-v", {}),
        *at_night(
            ("1f1b", {}),
            ("zb-h1", {}),
            ("v-half", {}),
            ("interleaved-zb", {}),
            ("gis", {"pipeline_activation_offload": "half"}),
            ("zb-v", {"pipeline_activation_offload": "full"}),
            ("1f1b", {"pipeline_recompute": "first:2"}),
            ("zb-h1", {"pipeline_vocab_parallel": 1}),
            ("zb-v", {"pipeline_vocab_parallel": 1}),
            ("zb-h1", {"pipeline_slices": 2, "pipeline_costs": f"{COSTS},attention=0.2"}),
            ("zb-v", {"pipeline_p2p": "batched"}),
        ),
    ],
)
def test_bytes_after_every_action_are_those_among_others(
    spec: str, overrides: dict[str, object]
) -> None:
    words, ranks = flags(spec, **overrides), range(RANKS)
    steps = zip(among_others(words, ranks), alone(words, ranks), strict=True)
    for rank, (real, own) in enumerate(steps):
        differing = [
            pair for pair in zip(real.samples, own.samples, strict=True) if len({*pair}) > 1
        ]
        print(f"{spec} rank {rank}: {len(real.samples)} actions, peak {real.peak} and {own.peak}")
        assert not differing, f"rank {rank}: {len(differing)} differ, first {differing[0]}"
        assert own.digest == real.digest


@nightly("bytes by day are those of whole sequences")
@pytest.mark.parametrize("spec", ["zb-v", None])
def test_bytes_of_divided_sequences_are_those_among_others(
    spec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Context-parallel ranks exchange keys and values. A rank that runs alone stores the same bytes
    after every action as among the other ranks, and runs the same program; under Megatron's own
    schedule its peak is the same."""
    context_parallel.install(monkeypatch)
    sizes = {"pipeline_model_parallel_size": 2, "context_parallel_size": 2, "num_layers": 8}
    words = flags(spec, **sizes, position_embedding_type="rope")
    real = among_others(words, range(2))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        count_bytes(patch, Path(folder))
        for rank in (0, 2):
            rehearsed(rank, RANKS, words)
        own = counted(Path(folder), range(2))
    if spec:
        assert own == real
    else:
        assert [one.peak for one in own] == [one.peak for one in real]


def test_no_thread_of_gloos_holds_what_was_reduced_over_one_rank() -> None:
    """A tensor that is reduced over a single rank is freed with its last reference. In one of a
    thousand reductions, gloo's thread used to free the tensor later. So a rank of a training
    sometimes stored one tensor of the cross entropy more than a rehearsed rank."""

    def held(_: int) -> int:
        def after_a_sum() -> int:
            torch.distributed.all_reduce(torch.ones(16))
            return sum(live.sizes().values())

        with LiveStorages() as live:
            return sum(after_a_sum() for _ in range(20000))

    assert values(run_ranks(1, held)) == [0]


@pytest.mark.parametrize("overrides", [{}, *at_night(STOCKS_LOOP)])
def test_peaks_of_megatrons_own_are_those_among_others(overrides: dict[str, object]) -> None:
    words, ranks = flags(None, **overrides), range(RANKS)
    together, each = among_others(words, ranks), alone(words, ranks)
    print([(real.peak, own.peak) for real, own in zip(together, each, strict=True)])
    assert [own.peak for own in each] == [real.peak for real in together]
    assert [len(own.samples) for own in each] == [len(real.samples) for real in together]


def costs_file(stages: int, folder: Path) -> Path:
    """Write a costs file with stages of unequal costs."""
    forward = [1 + stage % 3 for stage in range(stages)]
    path = folder / "costs.json"
    path.write_text(json.dumps({"version": 2, "f": forward, "i": forward, "w": 1, "comm": 0.1}))
    return path


UNEQUAL_LINE = {
    "pipeline_schedule": "zb-auto",
    "num_layers": 9,
    "decoder_first_pipeline_num_layers": 1,
    "decoder_last_pipeline_num_layers": 2,
}
UNEQUAL_V = {
    "pipeline_schedule": "v-auto",
    "num_layers": 16,
    "pipeline_model_parallel_layout": "Et|tt|ttt|t|tttt|tt|tt|tL",
}


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        (UNEQUAL_LINE, "estimate"),
        *at_night((UNEQUAL_V, "estimate"), (UNEQUAL_LINE, "file"), (UNEQUAL_V, "file")),
    ],
)
def test_a_rank_alone_runs_what_the_training_searches_for(
    overrides: dict[str, object], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rehearsed rank runs the program that the training's search finds. The training gathers the
    sizes of stages from all ranks. A rank alone used to give every stage its own size, and its
    search found another program, without a message. Each rehearsed rank gets the program of the
    launch command, and none searches."""
    shorten_search(monkeypatch)
    stages = 8 if overrides is UNEQUAL_V else 4
    costs = "estimate" if source == "estimate" else costs_file(stages, tmp_path)
    words = flags(None, **{**overrides, "pipeline_costs": costs})
    launch = read_launch(["torchrun", "--nproc-per-node", str(RANKS), str(SCRIPT), *words])
    name = str(overrides["pipeline_schedule"])
    (schedule,) = prepare(LaunchRequest(launch), (name,), tmp_path).schedules
    estimate = tmp_path / name / ESTIMATE
    own = words_alone(schedule.arguments, estimate, balances_experts=False, is_cpu=True)
    # The rates are those of a GPU, as the estimate of a training here would take the rates of this
    # CPU.
    if source == "estimate":
        words = flags(None, **{**overrides, "pipeline_costs": estimate})
    ranks = range(RANKS) if IS_NIGHT else range(1, 2)
    together = among_others(words, ranks)
    monkeypatch.setattr(programs, "_search", _no_search)
    assert {step.digest for step in alone(own, ranks)} == {together[0].digest} != {""}


def _no_search(*given: object) -> None:
    raise AssertionError("a rehearsed rank must not search for a schedule")
