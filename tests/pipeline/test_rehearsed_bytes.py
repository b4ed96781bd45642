"""A rank alone holds what it holds among the others, to the byte, and runs the same program."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.helpers.combinations import at_night
from tests.helpers.live_bytes import CountedStep, count_bytes, counted
from tests.helpers.megatron_runs import model_flags, train
from tests.helpers.rehearsals import rehearsed

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


def among_others_and_alone(
    words: list[str], ranks: range
) -> tuple[list[CountedStep], list[CountedStep]]:
    """The second steps of ``ranks`` in a training of all ranks, and of each alone."""
    steps = []
    for is_alone in (False, True):
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            count_bytes(patch, Path(folder))
            if is_alone:
                for rank in ranks:
                    record = rehearsed(rank, RANKS, words)
                    assert (record.trained, record.pipeline_rank) == (2, rank)
            else:
                train(RANKS, words)
            steps.append(counted(Path(folder), ranks))
    among, alone = steps
    return among, alone


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
    among, alone = among_others_and_alone(flags(spec, **overrides), range(RANKS))
    for rank, (real, own) in enumerate(zip(among, alone, strict=True)):
        differing = [
            pair for pair in zip(real.samples, own.samples, strict=True) if len({*pair}) > 1
        ]
        print(f"{spec} rank {rank}: {len(real.samples)} actions, peak {real.peak} and {own.peak}")
        assert not differing, f"rank {rank}: {len(differing)} differ, first {differing[0]}"
        assert own.digest == real.digest


@pytest.mark.parametrize("overrides", [{}, *at_night((STOCKS_LOOP,))])
def test_peaks_of_megatrons_own_are_those_among_others(overrides: dict[str, object]) -> None:
    among, alone = among_others_and_alone(flags(None, **overrides), range(RANKS))
    print([(real.peak, own.peak) for real, own in zip(among, alone, strict=True)])
    assert [own.peak for own in alone] == [real.peak for real in among]
    assert [len(own.samples) for own in alone] == [len(real.samples) for real in among]
