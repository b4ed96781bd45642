"""Loops, V's and waves against stock Megatron: the same numbers, to the last bit.

Weights are drawn by pipeline rank, so that a V starts from others than stock does. So stock trains
and saves at iteration 2; a schedule, whose stages lie elsewhere, loads that and trains on; then
losses, evaluation losses, all parameters and all optimizer tensors must be the same. Like stock
where stages lie, dropout draws by rank: it is compared between runs of one placement.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.schedule.build.auto_spec import is_open
from scripts.prepare_text import write
from scripts.pretrain_gpt import model_provider
from tests.helpers.combinations import IS_NIGHT, at_night, each_once, nightly
from tests.helpers.covered import covers
from tests.helpers.megatron_runs import (
    Run,
    assert_same,
    evaluations,
    losses,
    model_flags,
    train,
    whole_state,
)
from tests.helpers.ranks import lasting_folder
from tests.helpers.short_search import shorten_search

SAVED_AT = 2
ITERATIONS = 4
UNTIED = {"untie_embeddings_and_output_weights": True}
DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}


@dataclass(frozen=True)
class Setting:
    """A model and how it is parallelised; ``config`` is set on the model, for what has no flag."""

    ranks: int
    flags: dict[str, object]
    config: dict[str, object] = field(default_factory=dict)

    def train(self, **overrides: object) -> list[Run]:
        return train(self.ranks, model_flags(**self.flags | overrides), model_config=self.config)


def pipeline(ranks: int, layers: int = 8, **flags: object) -> dict[str, object]:
    return {
        "pipeline_model_parallel_size": ranks,
        "num_layers": layers,
        "train_iters": ITERATIONS,
        "eval_interval": 4,
        "eval_iters": 1,
        **flags,
    }


def distributed(layers: int = 8, **flags: object) -> Setting:
    """The distributed optimizer with both overlaps, two data-parallel ranks a pipeline rank."""
    optimizer: dict[str, object] = {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "dist_ckpt_optim_fully_reshardable": True,
    }
    return Setting(4, pipeline(2, layers) | optimizer | flags)


SETTINGS = {
    "pp2": Setting(2, pipeline(2)),
    "pp2 untied": Setting(2, pipeline(2, **UNTIED)),
    "pp2, 10 layers": Setting(2, pipeline(2, 10)),
    "pp3": Setting(3, pipeline(3, 12, global_batch_size=5)),
    "pp4": Setting(4, pipeline(4)),
    "pp4, 16 layers": Setting(4, pipeline(4, 16)),
    "pp8": Setting(8, pipeline(8, 16)),
    "tensor parallel": Setting(4, pipeline(2, 4, tensor_model_parallel_size=2)),
    "sequence parallel": Setting(
        4, pipeline(2, 4, tensor_model_parallel_size=2, sequence_parallel=True)
    ),
    "bf16": Setting(2, pipeline(2, bf16=True)),
    "loss per token": Setting(2, pipeline(2, calculate_per_token_loss=True)),
    "sequence lengths vary": Setting(2, pipeline(2), {"variable_seq_lengths": True}),
    "distributed optimizer": distributed(4),
    "distributed optimizer, untied": distributed(4, **UNTIED),
    "distributed optimizer, bf16": distributed(4, bf16=True),
    "distributed optimizer, padded buckets": distributed(4, hidden_size=64),
    "dp_reshardable": distributed(dist_ckpt_optim_fully_reshardable=None),
}
# By day not every family: what differs between those of one placement is their order, which is
# proved, and run with stand-ins for the model by test_adversary.py.
TRAINED = (
    *("zb-v", "v-half", "interleaved-zb"),
    *at_night("gis"),
    *at_night("v-auto", "v-min", "1f1b-v", "dualpipe-v", "interleaved", "breadth-first", "gis-h"),
    *at_night("chimera", "units:u=2"),
)
PARITY = [
    *(("pp2 untied", schedule) for schedule in TRAINED),
    ("pp2 untied", "hanayo"),
    *(("pp2", schedule) for schedule in ("zb-h1", "gis", "zb-v", "hanayo")),
    ("pp3", "hanayo"),
    ("loss per token", "zb-v"),
    ("sequence lengths vary", "zb-v"),
    # What is parallel besides, and bf16: test_matrix.py has a line, a V and a loop with each.
    *at_night(
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


@functools.cache
def stock(setting: str) -> tuple[list[Run], Path]:
    """Stock's run, and the checkpoint it left at iteration 2."""
    folder = lasting_folder()
    return SETTINGS[setting].train(save=folder, save_interval=SAVED_AT), folder


def resume(setting: str, **overrides: object) -> list[Run]:
    """Train on from stock's checkpoint of iteration 2 (the later ones stay unread)."""
    folder = stock(setting)[1]
    return SETTINGS[setting].train(load=folder, ckpt_step=SAVED_AT, **overrides)


def assert_copies_agree(runs: Sequence[Run]) -> None:
    """The embedding's and the output layer's weight are one, at setup and after each iteration."""
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
    reference, _ = stock(setting)
    runs = resume(setting, pipeline_schedule=schedule)
    assert len(losses(runs)) == len(losses(reference)) - SAVED_AT
    assert evaluations(runs)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert_same(runs, reference)
    for run, expected in zip(runs, reference, strict=True):
        assert run.norms == pytest.approx(expected.norms[SAVED_AT:], rel=2**-20)
    if "untied" not in setting and "parallel" not in setting:
        assert_copies_agree(runs)


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
    """One rank chooses and searches for all; the virtual stages on the line are kept to."""
    shorten_search(monkeypatch)
    reference, _ = stock(setting)
    capfd.readouterr()
    runs = resume(setting, pipeline_schedule=schedule, **flags)
    assert evaluations(runs) and {run.schedule for run in runs} == {"PipelineStep"}
    assert_same(runs, reference)
    said = capfd.readouterr().out
    if is_open(schedule):
        (line,) = [line for line in said.splitlines() if f"{schedule} takes --pipeline" in line]
        assert "the shortest predicted step of" in line


@pytest.mark.parametrize(("schedule", "microbatches"), each_once(["zb-v", "hanayo"], [1, 2]))
def test_fewer_microbatches_than_ranks(microbatches: int, schedule: str) -> None:
    runs = resume("pp3", pipeline_schedule=schedule, **few(microbatches))
    assert_same(runs, stock_with_few(microbatches))


def few(microbatches: int) -> dict[str, object]:
    return {"global_batch_size": microbatches, "override_opt_param_scheduler": True}


@functools.cache
def stock_with_few(microbatches: int) -> list[Run]:
    return resume("pp3", **few(microbatches))


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
    """Their output is their input (Megatron-LM #1852), which Megatron frees when it is sent."""
    runs = resume("pp2", pipeline_schedule=schedule, pipeline_model_parallel_layout=layout)
    assert_same(runs, stock("pp2")[0])


@pytest.mark.covers("A", ("v",), recompute_granularity="full", recompute_method="uniform")
def test_full_recompute() -> None:
    runs = resume(
        "pp2",
        pipeline_schedule="zb-v",
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert_same(runs, stock("pp2")[0])


def test_passes_that_run_again() -> None:
    """All of a training's, and none of an evaluation's."""
    runs = resume("pp2", pipeline_schedule="zb-v", pipeline_recompute="first:4")
    assert evaluations(runs)
    assert_same(runs, stock("pp2")[0])


def test_clipping_is_close() -> None:
    """The norm's sum over ranks has an order, and other tensors lie on each rank."""
    reference = resume("pp2", clip_grad=0.5)
    runs = resume("pp2", clip_grad=0.5, pipeline_schedule="zb-v")
    assert losses(runs) == pytest.approx(losses(reference), rel=1e-6)
    assert reference[0].norms[0] > 0.5, "nothing was clipped"
    for run, expected in zip(runs, reference, strict=True):
        assert run.norms == pytest.approx(expected.norms, rel=2**-20)


@nightly("test_matrix has full recompute on a V, and test_parity dropout with it on a line")
def test_dropout_is_drawn_again_by_recompute() -> None:
    """Against stock it cannot be: a V draws on other ranks, and in another order."""
    setting = SETTINGS["pp2"]
    reference = setting.train(pipeline_schedule="zb-v", **DROPOUT)
    runs = setting.train(
        pipeline_schedule="zb-v",
        **DROPOUT,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert_same(runs, reference)
    assert losses(runs) != losses(fresh()), "nothing was dropped"


def test_dropout_is_that_of_stocks_interleaving() -> None:
    """A rank draws for its chunks in the order of their forward passes, which is stock's."""
    setting = SETTINGS["pp2"]
    reference = setting.train(num_layers_per_virtual_pipeline_stage=2, **DROPOUT)
    assert {run.schedule for run in reference} == {"forward_backward_pipelining_with_interleaving"}
    assert_same(setting.train(pipeline_schedule="interleaved", **DROPOUT), reference)


# Checkpoints that a schedule leaves.


@functools.cache
def saved(setting: str, schedule: str, **flags: object) -> tuple[list[Run], Path]:
    """A run of ``schedule`` from initialisation, and its checkpoint of iteration 2."""
    folder = lasting_folder()
    overrides = {"save": folder, "save_interval": SAVED_AT, **flags}
    return SETTINGS[setting].train(pipeline_schedule=schedule, **overrides), folder


def fresh() -> list[Run]:
    return saved("pp2", "zb-v")[0]


def test_tied_copies_are_equal_from_the_start() -> None:
    runs = fresh()
    assert not runs[0].tables[0] and len(runs[1].tables[0]) == 2, "both copies on the last rank"
    assert_copies_agree(runs)


@pytest.mark.parametrize("schedule", [None, "gis", *at_night("1f1b", "hanayo")])
def test_saved_on_a_v_and_resumed_elsewhere(schedule: str | None) -> None:
    """Also under stock, with no flag of ours."""
    whole, folder = saved("pp2", "zb-v")
    runs = SETTINGS["pp2"].train(load=folder, ckpt_step=SAVED_AT, pipeline_schedule=schedule)
    assert len(losses(runs)) == len(losses(whole)) - SAVED_AT
    assert_same(runs, whole)


@pytest.mark.parametrize("setting", ["bf16", *at_night("pp2")])
def test_saved_and_resumed_on_a_v(setting: str) -> None:
    """As if never stopped; with bf16 the fp32 main parameters come back too."""
    whole, folder = saved(setting, "v-half")
    runs = SETTINGS[setting].train(load=folder, ckpt_step=SAVED_AT, pipeline_schedule="v-half")
    assert len(losses(runs)) == len(losses(whole)) - SAVED_AT
    assert_same(runs, whole)


# Real data: global rank 0, which has no first stage on a V, builds the indices for all.


@pytest.mark.parametrize("ranks", [2, *at_night(4)], ids=lambda ranks: f"pp{ranks}")
def test_real_data_without_cached_indices(ranks: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    for number in range(4):
        content = generator.integers(97, 123, 400, dtype=np.uint8).tobytes()
        (tmp_path / f"{number}.txt").write_bytes(content)
    write(sorted(tmp_path.glob("*.txt")), tmp_path / "text")
    setting = Setting(
        4,
        pipeline(
            ranks, mock_data=None, data_path=tmp_path / "text", split="80,20,0", vocab_size=257
        ),
    )
    reference = setting.train(
        save=tmp_path / "saved", save_interval=SAVED_AT, data_cache_path=tmp_path / "stock's"
    )
    cache = tmp_path / "ours"
    runs = setting.train(
        load=tmp_path / "saved",
        ckpt_step=SAVED_AT,
        data_cache_path=cache,
        pipeline_schedule="zb-v",
    )
    assert len(losses(runs)) == len(losses(reference)) - SAVED_AT and evaluations(runs)
    assert list(cache.glob("*.npy")), "no index was built"
    assert_same(runs, reference)


# Layers that do not divide evenly: the i-th segment of a layout is stage i.

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
    runs = resume(setting, pipeline_schedule="zb-v", **flags)
    assert [run.layers for run in runs] == layers
    assert_same(runs, stock(setting)[0])


# Models built another way, and another script.


def test_a_model_provider_builds_what_a_model_builder_does() -> None:
    """Scripts for Megatron before 0.19 have one."""
    flags = model_flags(**SETTINGS["pp2"].flags, pipeline_schedule="zb-v")
    runs = train(2, flags, model_provider=model_provider)
    assert_copies_agree(runs)
    assert_same(runs, fresh())


@pytest.mark.skipif("MEGATRON_LM_DIR" not in os.environ, reason="MEGATRON_LM_DIR is not set")
def test_the_upstream_script(tmp_path: Path) -> None:
    script = Path(os.environ["MEGATRON_LM_DIR"]) / "pretrain_gpt.py"
    flags = SETTINGS["pp2"].flags
    reference = train(2, model_flags(**flags, save=tmp_path, save_interval=SAVED_AT), script)
    ours = model_flags(**flags, load=tmp_path, ckpt_step=SAVED_AT, pipeline_schedule="zb-v")
    runs = train(2, ours, script)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    assert len(losses(runs)) == len(losses(reference)) - SAVED_AT
    assert_same(runs, reference)


def test_a_tensor_that_differs_is_noticed() -> None:
    """Names say what a tensor is: every layer is there, of whatever rank and chunk."""
    reference, other = stock("pp2")[0], fresh()
    for layer in range(8):
        name = f"optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight[{layer}]"
        assert name in whole_state(other)
    late = [Run(losses=losses(reference), state=run.state) for run in other]
    with pytest.raises(AssertionError, match="tensors differ"):
        assert_same(late, reference)
    with pytest.raises(AssertionError, match="rank 1 has another"):
        whole_state([reference[0], Run(state=dict.fromkeys(reference[0].state, 0))])
