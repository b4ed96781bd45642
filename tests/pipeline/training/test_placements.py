"""Tests of loop, V and wave placements: the numbers are stock Megatron's, to the last bit.

Megatron draws weights by pipeline rank, so a V starts from other weights than stock. Therefore
stock trains and saves at iteration 1, and a schedule, whose stages are on other ranks, loads that
checkpoint and trains on. Losses, evaluation losses, all parameters and all optimizer tensors must
then be equal. Dropout is drawn by rank too, so it is compared between runs of one placement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.compile.auto_spec import is_open
from scripts.prepare_text import write
from scripts.pretrain_gpt import model_provider
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.covers.marks import covers
from tests.helpers.fetched import megatron_sources
from tests.helpers.megatron_runs import Run, assert_same, evaluations, losses, whole_state
from tests.helpers.short_search import shorten_search
from tests.helpers.trainings import Training

SAVED_AT = 1
ITERATIONS = 3
UNTIED = {"untie_embeddings_and_output_weights": True}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def training(ranks: int, pipeline: int, layers: int = 8, /, **flags: object) -> Training:
    """Return a training with pipelines of ``pipeline`` ranks, and an evaluation at its end."""
    size = {"pipeline_model_parallel_size": pipeline, "num_layers": layers}
    length = {"train_iters": ITERATIONS, "eval_iters": 1}
    return Training(ranks, {**size, **length, **flags}, SAVED_AT)


def distributed(**flags: object) -> Training:
    """Return a training with the distributed optimizer, both overlaps, and two replicas."""
    optimizer: dict[str, object] = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "dist_ckpt_optim_fully_reshardable": True,
    }
    return training(4, 2, 4, **optimizer | flags)


SETTINGS = {
    "pp2": training(2, 2),
    "pp2 untied": training(2, 2, **UNTIED),
    "pp2, 10 layers": training(2, 2, 10),
    "pp3": training(3, 3, 12, global_batch_size=5),
    "pp4": training(4, 4),
    "pp4, 16 layers": training(4, 4, 16),
    "pp8": training(8, 8, 16),
    "tensor parallel": training(4, 2, 4, tensor_model_parallel_size=2),
    "sequence parallel": training(4, 2, 4, tensor_model_parallel_size=2, sequence_parallel=True),
    "bf16": training(2, 2, 4, bf16=True),
    "loss per token": training(2, 2, 4, calculate_per_token_loss=True),
    "sequence lengths vary": replace(training(2, 2, 4), config={"variable_seq_lengths": True}),
    "distributed optimizer": distributed(),
    "distributed optimizer, untied": distributed(**UNTIED),
    "distributed optimizer, bf16": distributed(bf16=True),
    "distributed optimizer, padded buckets": distributed(hidden_size=64),
    "dp_reshardable": distributed(dist_ckpt_optim_fully_reshardable=None),
}
# By day not every family runs: families of one placement differ in the order of their passes, which
# is proved, and which test_adversary.py runs on small stand-ins for the model.
TRAINED = (
    *("zb-v", "v-half", "interleaved-zb", "gis"),
    *("v-auto", "v-min", "1f1b-v", "dualpipe-v", "interleaved", "breadth-first", "gis-h"),
    *("chimera", "units:u=2"),
)
PARITY = [
    *(("pp2", schedule) for schedule in ("zb-h1", "gis", "zb-v", "hanayo")),
    ("sequence lengths vary", "zb-v"),
    # test_matrix.py combines a V with untied weights, with bf16 and with other kinds of
    # parallelism, and a line, a V and a loop with frozen weights. test_packed_sequences.py trains a
    # V with a loss per token. A test below trains a wave on three ranks.
    *at_night(
        *(("pp2 untied", schedule) for schedule in (*TRAINED, "hanayo")),
        ("pp3", "hanayo"),
        ("loss per token", "zb-v"),
        *(("pp4", schedule) for schedule in TRAINED),
        ("pp4, 16 layers", "hanayo"),
        ("pp4, 16 layers", "bitpipe"),
        ("pp2 untied", "bitpipe"),
        ("pp3", "zb-v"),
        ("pp3", "v-half"),
        ("pp8", "zb-v"),
        ("pp8", "v-half"),
        ("pp8", "interleaved"),
        ("tensor parallel", "zb-v"),
        ("sequence parallel", "zb-v"),
        ("sequence parallel", "gis"),
        ("bf16", "zb-v"),
        ("bf16", "gis"),
    ),
]


def assert_copies_agree(runs: Sequence[Run]) -> None:
    """Assert that the weights of the embedding and of the tied output layer are equal, at setup and
    after each iteration."""
    moments = list(zip(*(run.tables for run in runs), strict=True))
    assert len(moments) == len(losses(runs)) + 1
    for number, tables in enumerate(moments):
        digests = {(name, digest) for table in tables for name, digest in table.items()}
        assert len(digests) == 2, f"moment {number}: not two tables, or ranks differ: {digests}"
        assert len({digest for _, digest in digests}) == 1, f"they differ at moment {number}"


def case(setting: str, schedule: str) -> Any:
    flags = {**SETTINGS[setting].flags, **SETTINGS[setting].config}
    return pytest.param(setting, schedule, marks=covers("A", (schedule,), flags))


@pytest.mark.parametrize(("setting", "schedule"), [case(*names) for names in PARITY])
def test_resumed_training_is_stock_to_the_last_bit(setting: str, schedule: str) -> None:
    reference, _ = SETTINGS[setting].saved()
    runs = SETTINGS[setting].resume_as_stock(pipeline_schedule=schedule)
    assert evaluations(runs)
    for run, expected in zip(runs, reference, strict=True):
        assert run.norms == pytest.approx(expected.norms[SAVED_AT:], rel=2**-20)
    if "untied" not in setting and "parallel" not in setting:
        assert_copies_agree(runs)


def test_flags_of_megatrons_own_messages_change_nothing() -> None:
    """Flags of Megatron's own messages do not affect our schedules. With
    --no-overlap-p2p-communication and two ranks, Megatron's assertion about messages between
    virtual stages used to end a training on a V, although our schedules do not send Megatron's
    messages."""
    flags = {"no_overlap_p2p_communication": True}
    SETTINGS["pp2"].resume_as_stock(pipeline_schedule="zb-v", **flags)


@pytest.mark.parametrize(
    ("setting", "schedule", "flags"),
    [
        ("pp2", "auto", {"num_virtual_stages_per_pipeline_rank": 4}),
        *at_night(
            ("pp2", "auto:placement=loop,chunks=4", {"pipeline_memory_limit": "0.75x"}),
            ("pp3", "auto:chunks=2", {"pipeline_memory_limit": "2"}),
            ("pp3", "loop-auto:vpp=4", {}),
            ("pp4, 16 layers", "auto", {}),
            ("pp4, 16 layers", "wave-auto", {"pipeline_memory_limit": "0.6x"}),
            ("pp4, 16 layers", "auto:placement=loop,chunks=4", {"pipeline_memory_limit": "2.25"}),
        ),
    ],
)
def test_what_auto_takes_is_stock_to_the_last_bit(
    setting: str,
    schedule: str,
    flags: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The schedule that `auto` chooses trains as stock to the last bit. One rank chooses and
    searches for all ranks. `auto` keeps the number of virtual stages that the command gives."""
    shorten_search(monkeypatch)
    SETTINGS[setting].saved()
    capfd.readouterr()
    assert evaluations(SETTINGS[setting].resume_as_stock(pipeline_schedule=schedule, **flags))
    said = capfd.readouterr().out
    if is_open(schedule):
        (line,) = [line for line in said.splitlines() if f"{schedule} takes --pipeline" in line]
        why = r"a step \d+\.\d% shorter than |it is kept: "
        if flags.get("pipeline_memory_limit") == "2":
            why = "1f1b is invalid: 0F2 brings rank 0 over the memory limit of 2 microbatches"
        assert re.search(why, line)


# Schedules on an odd number of ranks and steps of one microbatch meet in test_adversary.py by day.
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("hanayo", 2), *at_night(("zb-v", 1), ("zb-v", 2), ("hanayo", 1))],
)
def test_fewer_microbatches_than_ranks(microbatches: int, schedule: str) -> None:
    few: dict[str, object] = {
        "global_batch_size": microbatches,
        "override_opt_param_scheduler": True,
    }
    setting = SETTINGS["pp3"]
    runs = setting.resume(pipeline_schedule=schedule, **few)
    assert_same(runs, setting.resume(**few))


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("zb-v", "Ett|t||tttttL"),
        *at_night(
            ("zb-v", "E||tttttttt|L"),
            ("interleaved-zb", "E|tttt||ttttL"),
            ("hanayo:waves=2", "Et|t||tt|t|tt||tL"),
        ),
    ],
)
def test_stages_without_layers(schedule: str, layout: str) -> None:
    """A stage without layers trains: its output is its own input (Megatron-LM #1852), although
    Megatron frees an output once it is sent."""
    ours = {"pipeline_schedule": schedule, "pipeline_model_parallel_layout": layout}
    SETTINGS["pp2"].resume_as_stock(**ours)


@pytest.mark.covers("A", ("v",), recompute_granularity="full", recompute_method="uniform")
def test_full_recompute() -> None:
    SETTINGS["pp2"].resume_as_stock(pipeline_schedule="zb-v", **RECOMPUTE)


def test_recomputed_passes() -> None:
    """With --pipeline-recompute for all stages, all passes of a training step are recomputed, and
    none of an evaluation; the numbers are stock's."""
    ours = {"pipeline_schedule": "zb-v", "pipeline_recompute": "first:4"}
    assert evaluations(SETTINGS["pp2"].resume_as_stock(**ours))


def test_clipping_is_close() -> None:
    """With gradient clipping, losses and norms on a V equal stock's up to rounding: a norm is
    summed over the ranks one after the other, and each rank has other tensors than in stock."""
    reference = SETTINGS["pp2"].resume(clip_grad=0.5)
    runs = SETTINGS["pp2"].resume(clip_grad=0.5, pipeline_schedule="zb-v")
    assert losses(runs) == pytest.approx(losses(reference), rel=1e-6)
    assert reference[0].norms[0] > 0.5, "nothing was clipped"
    for run, expected in zip(runs, reference, strict=True):
        assert run.norms == pytest.approx(expected.norms, rel=2**-20)


@nightly("test_full_recompute has a V with it, and test_parity.py dropout with it on a line")
def test_dropout_is_drawn_again_by_recompute() -> None:
    """Recomputed layers draw the dropout of their first forward pass again. The reference is a V
    without recompute, because a V draws dropout on other ranks than stock and in another order."""
    setting = SETTINGS["pp2"]
    reference = setting.run(pipeline_schedule="zb-v", **DROPOUT)
    runs = setting.run(pipeline_schedule="zb-v", **DROPOUT, **RECOMPUTE)
    assert_same(runs, reference)
    assert losses(runs) != losses(fresh()), "nothing was dropped"


def test_dropout_is_that_of_stocks_interleaving() -> None:
    """Under a loop (interleaved) placement dropout equals that of stock's interleaved schedule: a
    rank draws for its chunks in the order of their forward passes, which is stock's."""
    setting = SETTINGS["pp2"]
    reference = setting.run(num_layers_per_virtual_pipeline_stage=2, **DROPOUT)
    assert {run.schedule for run in reference} == {"forward_backward_pipelining_with_interleaving"}
    assert_same(setting.run(pipeline_schedule="interleaved", **DROPOUT), reference)


# --- checkpoints that a schedule saves


def fresh() -> list[Run]:
    """Return a run on a V from the start."""
    return SETTINGS["pp2"].saved(pipeline_schedule="zb-v")[0]


def test_tied_copies_are_equal_from_the_start() -> None:
    runs = fresh()
    assert not runs[0].tables[0] and len(runs[1].tables[0]) == 2, "both copies on the last rank"
    assert_copies_agree(runs)


@pytest.mark.parametrize("schedule", [None, *at_night("gis", "1f1b", "hanayo")])
def test_saved_on_a_v_and_resumed_elsewhere(schedule: str | None) -> None:
    """A checkpoint saved on a V is resumed under other schedules, and under stock without a flag of
    megatron_ext."""
    setting = SETTINGS["pp2"]
    setting.resume_as(setting.saved(pipeline_schedule="zb-v"), pipeline_schedule=schedule)


@pytest.mark.parametrize("setting", ["bf16", *at_night("pp2")])
def test_saved_and_resumed_on_a_v(setting: str) -> None:
    """A run on a V that is saved and resumed equals one that never stopped. With bf16 the fp32 main
    parameters are restored too."""
    whole = SETTINGS[setting].saved(pipeline_schedule="v-half")
    SETTINGS[setting].resume_as(whole, pipeline_schedule="v-half")


# --- real data; global rank 0, which has no first stage on a V, builds the indices for all ranks


@pytest.mark.parametrize("ranks", [2, *at_night(4)], ids=lambda ranks: f"pp{ranks}")
def test_real_data_without_cached_indices(ranks: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    for number in range(4):
        content = generator.integers(97, 123, 400, dtype=np.uint8).tobytes()
        (tmp_path / f"{number}.txt").write_bytes(content)
    write(sorted(tmp_path.glob("*.txt")), tmp_path / "text")
    data: dict[str, object] = {"data_path": tmp_path / "text", "split": "80,20,0"}
    setting = training(4, ranks, mock_data=None, vocab_size=257, **data)
    whole = setting.saved(data_cache_path=tmp_path / "stock's")
    cache = tmp_path / "ours"
    runs = setting.resume_as(whole, data_cache_path=cache, pipeline_schedule="zb-v")
    assert evaluations(runs)
    assert list(cache.glob("*.npy")), "no index was built"


# --- layers that cannot be split evenly; segment i of a layout is stage i

UNEVEN: dict[str, tuple[str, dict[str, object], list[list[list[int]]]]] = {
    "layout": (
        "pp2",
        {"pipeline_model_parallel_layout": "Et|tt|t|ttttL"},
        [[[1, 2], [3]], [[0], [4, 5, 6, 7]]],
    ),
    "layers of the first stage": (
        "pp2",
        {"decoder_first_pipeline_num_layers": 5},
        [[[5], [6]], [[0, 1, 2, 3, 4], [7]]],
    ),
    "layers of the last stage": (
        "pp2",
        {"decoder_last_pipeline_num_layers": 5},
        [[[1], [2]], [[0], [3, 4, 5, 6, 7]]],
    ),
    "embedding and loss count as layers": (
        "pp2, 10 layers",
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        [[[2, 3, 4], [5, 6, 7]], [[0, 1], [8, 9]]],
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=covers("A", ("zb-v",), flags))
        for name, (_, flags, _) in UNEVEN.items()
        if IS_NIGHT or name != "embedding and loss count as layers"
    ],
)
def test_uneven_stages(case: str) -> None:
    setting, flags, layers = UNEVEN[case]
    runs = SETTINGS[setting].resume_as_stock(pipeline_schedule="zb-v", **flags)
    assert [run.layers for run in runs] == layers


# --- models from a model provider, and Megatron's own training script


def test_a_model_provider_builds_what_a_model_builder_does() -> None:
    """A model provider, as scripts for Megatron before 0.19 use it, builds the same model on a V as
    a model builder."""
    runs = replace(SETTINGS["pp2"], build=model_provider).run(pipeline_schedule="zb-v")
    assert_copies_agree(runs)
    assert_same(runs, fresh())


def test_the_upstream_script() -> None:
    script = megatron_sources() / "pretrain_gpt.py"
    replace(SETTINGS["pp2"], script=script).resume_as_stock(pipeline_schedule="zb-v")


def test_a_tensor_that_differs_is_noticed() -> None:
    """The comparison of two runs notices a tensor that differs. Names identify a tensor's layer, so
    the tensors of every layer are compared on whatever rank and chunk they lie."""
    reference, other = SETTINGS["pp2"].saved()[0], fresh()
    for layer in range(8):
        name = f"optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight[{layer}]"
        assert name in whole_state(other)
    late = [Run(losses=losses(reference), state=run.state) for run in other]
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_same(late, reference)
    with pytest.raises(AssertionError, match="rank 1 has another"):
        whole_state([reference[0], Run(state=dict.fromkeys(reference[0].state, 0))])
