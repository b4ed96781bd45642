"""Tests of data loaders under virtual stages that the user did not request, compared with stock to
the last bit.

Megatron's loop expects one loader a rank. With several chunks there is a list of loaders, which
Megatron used to take for a single loader, or for a list of validation sets. On a V global rank 0
has no loader at all, and Megatron lets that rank decide whether to train.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.prepare_text import VOCABULARY, write
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import (
    SCRIPT,
    Run,
    assert_same,
    evaluations,
    losses,
    model_flags,
    train,
    train_or_fail,
)
from tests.helpers.ranks import lasting_folder

OWN_DATA = Path(__file__).parents[1] / "scripts" / "pretrain_own_data.py"
PIPELINE: dict[str, object] = {
    "pipeline_model_parallel_size": 2,
    "num_layers": 8 if IS_NIGHT else 4,  # at night some schedules have eight stages
    "global_batch_size": 4,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "train_iters": 4,
    "eval_interval": 3,
    "eval_iters": 1,
}


def run(ranks: int, script: Path = SCRIPT, /, **flags: object) -> list[Run]:
    return train(ranks, model_flags(**PIPELINE | flags), script, model_provider=drawn_by_name)


# --- loaders of the training script, on the first and last stage only; iteration 3 is skipped

EXTERNAL: dict[str, object] = {
    "mock_data": None,
    "dataloader_type": "external",
    "no_create_attention_mask_in_dataloader": True,
    "iterations_to_skip": 3,
    "save_interval": 2,
}
SIZES: dict[str, tuple[int, dict[str, object]]] = {
    "pp2": (2, {}),
    "pp2, dp2": (4, {}),
    "pp2, tp2": (4, {"tensor_model_parallel_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
}


def run_and_save(size: str, schedule: str | None) -> tuple[list[Run], list[dict[str, int]]]:
    """Train with loaders of the script, and return the ranks' runs and the saved states of the
    loaders, one for each replica."""
    folder = lasting_folder()
    ranks, flags = SIZES[size]
    flags = {**EXTERNAL, **flags, "save": folder / "model", "dataloader_save": folder / "data"}
    runs = run(ranks, OWN_DATA, **flags, pipeline_schedule=schedule)
    files = sorted((folder / "data" / "iter_0000002" / "mp_rank_00_000").glob("*.pt"))
    return runs, [torch.load(file)["dataloader_state_dict"] for file in files]


@functools.cache
def stock(size: str) -> tuple[list[Run], list[dict[str, int]]]:
    """Return stock's run. Two pipeline ranks run in place of four, with the same numbers, because
    stock cannot skip steps on pipeline ranks without a loader."""
    return run_and_save("pp2" if size == "pp4" else size, None)


@pytest.mark.parametrize(
    ("size", "schedule"),
    [
        ("pp2", "interleaved-zb"),
        ("pp2, dp2", "zb-v"),
        *at_night(
            ("pp2", "zb-v"),
            ("pp2", "hanayo"),
            ("pp2, dp2", "interleaved-zb"),
            ("pp2, tp2", "zb-v"),
            ("pp2, tp2", "interleaved-zb"),
            ("pp4", "zb-v"),
            ("pp4", "interleaved-zb"),
        ),
    ],
)
def test_loaders_of_the_scripts_own(size: str, schedule: str) -> None:
    """A script's own data loaders train and are saved under our schedules as under stock. Under a V
    the run used to end with exit code 0 and without a step. Under all other schedules the first
    save used to fail before the model was written, and an iteration of --iterations-to-skip failed
    too."""
    reference, states = stock(size)
    assert len(set(losses(reference))) == 3 and len(evaluations(reference)) == 2
    assert states == [{"microbatches": 2 * (2 if "dp2" in size else 4)}] * len(states)
    assert len(states) == (2 if "dp2" in size else 1)
    runs, ours = run_and_save(size, schedule)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert ours == states
    assert_same(runs, reference)


# --- several validation sets of different lengths

# In these trainings a test set is built but not evaluated, because Megatron would take it for
# several sets.


@functools.cache
def sets() -> dict[str, object]:
    """Return flags of a training with two validation sets."""
    folder = lasting_folder()
    generator = np.random.default_rng(1)
    for name, tokens in (("train", 2000), ("long", 200), ("short", 120)):
        text = generator.integers(97, 123, tokens, dtype=np.uint8).tobytes()
        (folder / f"{name}.txt").write_bytes(text)
        write([folder / f"{name}.txt"], folder / name)
    return {
        "mock_data": None,
        "vocab_size": VOCABULARY,
        "train_data_path": folder / "train",
        "valid_data_path": (folder / "long", folder / "short"),
        "test_data_path": folder / "short",
        "multiple_validation_sets": True,
        "full_validation": True,
        "eval_interval": 2,
        "exit_interval": 2,
    }


@functools.cache
def stocks_sets(**flags: Any) -> list[Run]:
    return run(4, **sets() | flags)


@pytest.mark.parametrize("schedule", ["zb-v", *at_night("interleaved-zb", "hanayo", "1f1b")])
def test_several_validation_sets(schedule: str, tmp_path: Path) -> None:
    """Two validation sets get stock's losses. A V used to print the same loss for both: each set
    was evaluated on the tokens of one set and the labels of another, or of none. With data
    parallelism the job hung, because global rank 0 had loaders that its peers lacked. The test set
    of a rank's second chunk used to have as many samples as the validation sets of the first
    chunk."""
    reference = stocks_sets()
    assert len(set(evaluations(reference))) == 2
    flags = sets() | {"data_cache_path": tmp_path / "cache", "pipeline_schedule": schedule}
    runs = run(4, **flags)
    assert list((tmp_path / "cache").glob("*.npy")), "no index was built"
    assert_same(runs, reference)


@nightly("by day they are evaluated within a training")
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-zb"])
def test_several_validation_sets_without_training(schedule: str) -> None:
    alone = {"skip_train": True, "no_load_optim": True, "test_data_path": None}
    results = [
        train_or_fail(
            2,
            model_flags(**PIPELINE | sets() | alone, pipeline_schedule=chosen),
            model_provider=drawn_by_name,
        )
        for chosen in (None, schedule)
    ]
    reference, runs = ([result.value for result in ended] for ended in results)
    assert evaluations(runs) == evaluations(reference) and len(set(evaluations(runs))) == 2


# --- checkpoints of the format torch, which save a rank's chunks one by one


def saved_as_torch(schedule: str | None) -> tuple[list[Run], Path]:
    folder = lasting_folder()
    flags = {"ckpt_format": "torch", "save": folder, "save_interval": 2}
    return run(2, **flags, pipeline_schedule=schedule), folder


@pytest.mark.parametrize(
    ("schedule", "ckpt_format"),
    [
        ("interleaved-zb", "torch"),
        *at_night(("zb-v", "torch_dist"), ("interleaved:vpp=4", "torch")),
    ],
)
def test_a_checkpoint_of_other_chunks_is_refused(schedule: str, ckpt_format: str) -> None:
    """A checkpoint with another number of chunks a rank is refused. Megatron treats a chunk that
    the checkpoint lacks as an empty stage: no weight used to be loaded, and training began from
    random weights."""
    _, folder = saved_as_torch("interleaved-zb" if "vpp" in schedule else None)
    flags = {"load": folder, "ckpt_step": 2, "ckpt_format": ckpt_format}
    words = model_flags(**PIPELINE | flags, pipeline_schedule=schedule)
    for result in train_or_fail(2, words):
        assert result.exit_code == 1 and result.error.endswith("SystemExit: 2\n"), result.error
        if lines := [line for line in result.stderr.splitlines() if "error: " in line]:
            assert "--ckpt-convert-format torch_dist" in lines[0]


@nightly("by day others are refused, and checkpoints of format torch_dist loaded")
def test_a_checkpoint_of_the_same_chunks_is_loaded() -> None:
    whole, folder = saved_as_torch("interleaved-zb")
    flags = {"load": folder, "ckpt_step": 2, "ckpt_format": "torch"}
    runs = run(2, **flags, pipeline_schedule="interleaved-zb")
    assert len(losses(runs)) == 2
    assert_same(runs, whole)


# --- a step that Megatron repeats after a checkpoint, because its result was suspicious


def with_a_pending_step(schedule: str | None) -> Path:
    folder = lasting_folder()
    flags = {
        "save": folder,
        "save_interval": 100,
        "error_injection_rate": 1,
        "error_injection_type": "correct_result",
        "pipeline_schedule": schedule,
    }
    for result in train_or_fail(2, model_flags(**PIPELINE | flags)):
        assert result.error.endswith("SystemExit: 16\n"), result.error
    return folder


@pytest.mark.parametrize(("saver", "loader"), [(None, "zb-v"), *at_night(("zb-v", "zb-h1"))])
def test_a_pending_step_of_other_stages_is_refused(saver: str | None, loader: str) -> None:
    """A checkpoint with a pending repetition of a step (of Megatron's rerun machine) is refused
    under other stages. Megatron would compare results of one stage with those of another, and blame
    the GPU. With --rerun-mode disabled Megatron forgets that step, and the checkpoint loads."""
    flags = {"load": with_a_pending_step(saver), "pipeline_schedule": loader}
    results = train_or_fail(2, model_flags(**PIPELINE | flags))
    for result in results:
        assert result.error.endswith("SystemExit: 2\n"), result.error
    (line,) = [line for line in results[0].stderr.splitlines() if "error: " in line]
    assert "--rerun-mode disabled" in line and str(saver or "none") in line
    assert len(losses(run(2, **flags, rerun_mode="disabled"))) == 3


@nightly("by day other stages are refused")
@pytest.mark.parametrize(("saver", "loader"), [(None, "zb-h1"), ("zb-v", "v-half")])
def test_a_pending_step_is_run_again_where_stages_are_the_same(
    saver: str | None, loader: str
) -> None:
    """A checkpoint with a pending repetition of a step resumes under a schedule with the same
    stages, and Megatron repeats the step. The repetition needs another device. Both runs use
    the same one here, so Megatron ends with the request to resume once more (exit code 16)."""
    flags = {"load": with_a_pending_step(saver), "pipeline_schedule": loader}
    for result in train_or_fail(2, model_flags(**PIPELINE | flags)):
        assert result.error.endswith("SystemExit: 16\n"), result.error
