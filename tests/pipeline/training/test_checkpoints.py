"""Tests of checkpoints of the distributed optimizer, saved under one schedule and loaded under
another.

The trainings run on two pipeline ranks with two data-parallel ranks each, with reductions and
gathers overlapped. Losses, parameters, main parameters and Adam's tensors are compared to the last
bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.combinations import at_night, nightly
from tests.helpers.megatron_runs import Run, assert_same, losses, train_or_fail
from tests.helpers.ranks import RankResult
from tests.helpers.trainings import Saved
from tests.pipeline.training.test_placements import ITERATIONS, SAVED_AT, SETTINGS

STOCK = None  # stock Megatron: no schedule flag


def saved(setting: str, schedule: str | None, **flags: object) -> Saved:
    return SETTINGS[setting].saved(pipeline_schedule=schedule, **flags)


def resume(setting: str, whole: Saved, schedule: str | None, **flags: object) -> list[Run]:
    return SETTINGS[setting].resume_as(whole, pipeline_schedule=schedule, **flags)


@pytest.mark.parametrize(
    ("setting", "schedule"),
    [
        ("distributed optimizer", "zb-v"),
        ("distributed optimizer", STOCK),
        *at_night(
            ("distributed optimizer, untied", STOCK),
            ("distributed optimizer", "gis"),
            ("distributed optimizer, bf16", "1f1b"),
            ("distributed optimizer", "1f1b"),
            ("distributed optimizer, bf16", "zb-v"),
            ("distributed optimizer, bf16", STOCK),
        ),
    ],
)
def test_saved_on_a_v_and_resumed(setting: str, schedule: str | None) -> None:
    """A training on a V with a tied embedding and data-parallel ranks is saved and resumed. Such a
    checkpoint used to fail in its save: both copies of the embedding's weight are on one rank, and
    both were written."""
    resume(setting, saved(setting, "zb-v"), schedule)


@pytest.mark.parametrize("schedule", ["zb-v", STOCK])
def test_states_behind_padding(schedule: str | None) -> None:
    """A training resumes with the right optimizer states although a gradient bucket is padded. At
    this model size the layers' bucket gets 64 elements of padding. The embedding's states, which
    follow, used to lose their first 64 elements and to end with 64 zeros, so a resumed run
    drifted."""
    setting = "distributed optimizer, padded buckets"
    resume(setting, saved(setting, "zb-v"), schedule)


@pytest.mark.parametrize(
    ("setting", "schedule"),
    [
        ("distributed optimizer", STOCK),
        ("distributed optimizer", "zb-v"),
        # By day test_placements.py resumes main parameters of bf16.
        *at_night(("distributed optimizer", "gis"), ("distributed optimizer, bf16", "zb-v")),
    ],
)
def test_saved_by_stock_and_resumed(setting: str, schedule: str | None) -> None:
    """A training resumes from a checkpoint that stock Megatron saved. Without a GPU, stock itself
    used to resume with other numbers or not at all: all parameters shared one step count of Adam's,
    and each parameter incremented it."""
    runs = resume(setting, saved(setting, STOCK), schedule)
    # The last rank of a V has both tables. They are equal after setup and after each iteration,
    # although parameters that other ranks updated arrive only with the gather in the next forward
    # pass.
    if schedule == "zb-v":
        moments = [tables for run in runs[2:] for tables in run.tables]
        assert len(moments) == 2 * (ITERATIONS - SAVED_AT + 1)
        assert all(len(tables) == 2 and len({*tables.values()}) == 1 for tables in moments)


@nightly("what is saved is the same; a process in the background of each rank takes half a minute")
def test_saved_in_the_background() -> None:
    whole = saved(
        "distributed optimizer",
        "zb-v",
        async_save=True,
        use_persistent_ckpt_worker=True,
        async_strategy="mcore",
    )
    resume("distributed optimizer", whole, STOCK)


def test_a_checkpoint_needs_nothing_of_ours() -> None:
    """A checkpoint that was saved under our schedule contains nothing of our package, so stock can
    load it. Megatron saves its arguments, and one of our arguments used to be an enum of
    megatron_ext."""
    folder = saved("distributed optimizer", "zb-v")[1]
    contents = [path.read_bytes() for path in folder.glob("iter_*/*") if path.is_file()]
    assert any(b"pipeline_schedule" in content for content in contents), "no arguments were saved"
    assert not any(b"megatron_ext" in content for content in contents)


def test_loaded_in_parallel() -> None:
    """A checkpoint is resumed with Megatron's fully parallel load: each data-parallel rank reads a
    part and sends it to the other replicas."""
    setting = "distributed optimizer"
    for schedule in ("gis", *at_night("zb-v")):
        resume(setting, saved(setting, "zb-v"), schedule, ckpt_fully_parallel_load=True)


# --- Megatron's default format (dp_reshardable) keeps optimizer states on their pipeline ranks


def refused(setting: str, folder: Path, schedule: str | None) -> list[RankResult]:
    flags = {"load": folder, "ckpt_step": SAVED_AT, "pipeline_schedule": schedule}
    return train_or_fail(SETTINGS[setting].ranks, SETTINGS[setting].words(**flags))


@nightly("by day the other formats load another placement, and refuse what they must")
def test_one_placement_needs_no_other_format() -> None:
    resume("dp_reshardable", saved("dp_reshardable", "zb-v"), "zb-v")
    resume("dp_reshardable", saved("dp_reshardable", STOCK), "zb-h1")


@pytest.mark.parametrize(("saver", "loader"), [(STOCK, "zb-v"), *at_night(("zb-v", "gis"))])
def test_another_placement_is_refused(saver: str | None, loader: str) -> None:
    """A checkpoint in the format dp_reshardable is refused under another placement, in one line.
    Some ranks used to report that a bucket's size differs, others that a peer is gone. If all sizes
    agree, Megatron loads the states of another stage without a message."""
    folder = saved("dp_reshardable", saver)[1]
    results = refused("dp_reshardable", folder, loader)
    for result in results:
        assert result.exit_code == 1 and result.error.endswith("SystemExit: 2\n"), result.error
    (line,) = [line for line in results[0].stderr.splitlines() if "megatron_ext: error" in line]
    assert "--dist-ckpt-optim-fully-reshardable" in line and "[1, 0, 0, 1]" in line


def test_stock_refuses_a_vs_states() -> None:
    """Stock Megatron refuses optimizer states of a V in the format dp_reshardable: the first
    stage's weights are on another rank, so sizes differ on each rank."""
    folder = saved("dp_reshardable", "zb-v")[1]
    for result in refused("dp_reshardable", folder, STOCK):
        assert result.exit_code == 1 and "Global shape mismatch" in result.error, result.error


def test_model_alone_loads_anywhere() -> None:
    """A checkpoint in the format dp_reshardable loads under any placement with --no-load-optim, as
    the refusal recommends: the model alone, without optimizer states."""
    whole, folder = saved("dp_reshardable", "zb-v")
    ours: dict[str, object] = {"pipeline_schedule": "gis", "no_load_optim": True}
    runs = SETTINGS["dp_reshardable"].resume(folder, **ours)
    assert losses(runs)[0] == losses(whole)[SAVED_AT]


@nightly("two runs of stock's to see that what a refusal says can be done")
def test_another_format_is_converted_by_stock(tmp_path: Path) -> None:
    setting = SETTINGS["distributed optimizer"]
    older: dict[str, object] = {"ckpt_format": "torch"}
    whole = setting.run(save=tmp_path / "old", save_interval=SAVED_AT, **older)
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    to = {"ckpt_convert_format": "torch_dist", "ckpt_convert_save": tmp_path / "new"}
    # This run ends before it trains, so its ranks return nothing.
    train_or_fail(setting.ranks, setting.words(**older | to, load=tmp_path / "old"))
    runs = setting.run(load=tmp_path / "new" / "torch_dist", pipeline_schedule="zb-v")
    assert len(losses(runs)) == len(losses(whole)) - SAVED_AT
    assert_same(runs, whole)
