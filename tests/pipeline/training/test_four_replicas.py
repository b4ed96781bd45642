"""Trainings of four replicas of two stages, compared with stock Megatron to the last bit.

Gloo adds four gradients in an order that depends on their position in a buffer, which two replicas
cannot show. Megatron's 1F1B has one buffer on a rank, and its interleaved schedule one for each
chunk, as V's and loops of ours have. So linear placements are compared with 1F1B, V's and loops
with the interleaved schedule, and layers lie on the same stages in both.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.combinations import nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import losses
from tests.helpers.trainings import Training
from tests.pipeline.features.test_race import COSTS, WHOLE, shorten_and_emulate

Flags = dict[str, object]

pytestmark = nightly("test_matrix.py has two replicas")

REPLICAS, STAGES, MICROBATCHES = 4, 2, 4
ULP = 2.0**-23  # unit in the last place of fp32, relative


def training(samples: int, more: Flags) -> Training:
    """Return stock's training with ``samples`` sequences in a microbatch."""
    flags: Flags = {
        "pipeline_model_parallel_size": STAGES,
        "num_layers": 4,
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 8,
        "micro_batch_size": samples,
        "global_batch_size": samples * MICROBATCHES * REPLICAS,
        "train_iters": 3,
    }
    return Training(STAGES * REPLICAS, flags | more, build=drawn_by_name)


DISTRIBUTED: Flags = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
TWO_CHUNKS: Flags = {"num_virtual_stages_per_pipeline_rank": 2}
FULL: Flags = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# A layer of the first stage is moved to another one.
MOVED: Flags = {"pipeline_model_parallel_layout": "Et|tttL"}
MOVED_ON_V: Flags = {"pipeline_model_parallel_layout": "E|tt|t|tL"}

LINE = training(2, {})
SHARDED_LINE = training(1, DISTRIBUTED)
CHUNKS = training(1, {})
SHARDED_CHUNKS = training(2, DISTRIBUTED)


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        pytest.param(LINE, {"pipeline_schedule": "zb-h1"}, id="zb-h1"),
        pytest.param(
            LINE,
            {"pipeline_schedule": "zb-h1", "pipeline_activation_offload": "full"},
            id="zb-h1, offload",
        ),
        pytest.param(LINE.but(**MOVED), {"pipeline_schedule": "zb-h1"}, id="zb-h1, moved layer"),
        pytest.param(
            SHARDED_LINE, {"pipeline_schedule": "zb-h1"}, id="zb-h1, distributed optimizer"
        ),
        pytest.param(
            SHARDED_LINE,
            {"pipeline_schedule": "zb-h1", "pipeline_recompute": "first:2"},
            id="zb-h1, distributed optimizer, recompute of the schedule",
        ),
    ],
)
def test_a_line_is_stock_to_the_last_bit(stock: Training, ours: Flags) -> None:
    stock.start_as_stock(**ours)


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        pytest.param(CHUNKS, {"pipeline_schedule": "zb-v"}, id="zb-v"),
        pytest.param(CHUNKS, {"pipeline_schedule": "interleaved-zb"}, id="interleaved-zb"),
        pytest.param(
            CHUNKS, {"pipeline_schedule": "auto:placement=v,chunks=2"}, id="auto, a V of two chunks"
        ),
        pytest.param(
            SHARDED_CHUNKS,
            {"pipeline_schedule": "zb-v", **FULL},
            id="zb-v, distributed optimizer, full recompute",
        ),
        pytest.param(
            SHARDED_CHUNKS,
            {"pipeline_schedule": "interleaved-zb"},
            id="interleaved-zb, distributed optimizer",
        ),
        pytest.param(
            SHARDED_CHUNKS.but(**MOVED_ON_V),
            {"pipeline_schedule": "zb-v"},
            id="zb-v, distributed optimizer, moved layer",
        ),
    ],
)
def test_two_chunks_on_a_rank_are_stock_to_the_last_bit(stock: Training, ours: Flags) -> None:
    virtual = {} if "pipeline_model_parallel_layout" in stock.flags else TWO_CHUNKS
    stock.start_as(stock.but(**virtual), **ours)


@pytest.mark.parametrize(
    ("stock", "schedule"),
    [(LINE, "zb-h1"), (SHARDED_CHUNKS, "zb-v")],
    ids=["zb-h1", "zb-v, distributed optimizer"],
)
def test_a_split_vocabulary_trains_as_stock_does(stock: Training, schedule: str) -> None:
    """Four replicas with a vocabulary split over the ranks have losses close to stock's, as sums
    over a split vocabulary have another order. Training starts from stock's checkpoint, as a split
    table would be drawn with other weights."""
    stock = replace(stock.but(dist_ckpt_optim_fully_reshardable=True), build=None)
    ours: Flags = {"pipeline_schedule": schedule, "pipeline_vocab_parallel": 2}
    runs = stock.resume(**ours)
    assert {run.schedule for run in runs} == {"PipelineStep"}
    whole, *_ = stock.saved()
    assert len(losses(runs)) == 2
    assert losses(runs) == pytest.approx(losses(whole)[1:], rel=16 * ULP)


def test_a_race_changes_nothing_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shorten_and_emulate(monkeypatch)
    raced = SHARDED_LINE.but(train_iters=WHOLE)
    raced.start_as_stock(pipeline_race="zb-h1", pipeline_costs=COSTS)
    assert "race is over: zb-h1 is " in capfd.readouterr().out
