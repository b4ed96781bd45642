"""Tests of combinations of settings, pair by pair, against stock: from one checkpoint, to the last
bit.

Every schedule meets every kind of parallelism. Tied and untied weights, recompute and precision are
spread over these cases so that any two settings meet somewhere. Stock trains and saves after its
first iteration, and a schedule loads that checkpoint and trains on. This file writes the table of
docs/compatibility.md.
"""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.adapter.step.model_stage import ModelStage
from scripts.pretrain_gpt import model_provider
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.covers.marks import covers
from tests.helpers.documents import check_written, table
from tests.helpers.trainings import Training

RANKS = 4

Flags = dict[str, object]

SCHEDULES = ("1f1b", "zb-auto", "zb-v", "v-half", "interleaved")
TENSOR: Flags = {"tensor_model_parallel_size": 2}
EXPERTS: Flags = {
    "expert_model_parallel_size": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "alltoall",
    "disable_bias_linear": True,
}
PARALLELISM: dict[str, Flags] = {
    "TP2": TENSOR,
    "TP2, SP": TENSOR | {"sequence_parallel": True},
    "EP2, 4 experts": EXPERTS,
    "DP2": {},
    "DP2, distributed optimizer, both overlaps": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "dist_ckpt_optim_fully_reshardable": True,
    },
}
EMBEDDINGS: dict[str, Flags] = {"tied": {}, "untied": {"untie_embeddings_and_output_weights": True}}
RECOMPUTE: dict[str, Flags] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
PRECISION: dict[str, Flags] = {"fp32": {}, "bf16": {"bf16": True}}


@dataclass(frozen=True)
class Case:
    schedule: str
    parallelism: str
    embeddings: str
    recompute: str
    precision: str

    def __str__(self) -> str:
        return ", ".join(astuple(self))


def _cases() -> list[Case]:
    """Return all combinations of a schedule and a parallelism. The other settings take turns in
    them, so that each parallelism needs only two runs of stock."""
    return [
        Case(
            schedule,
            parallelism,
            list(EMBEDDINGS)[(column + row) % 2],
            list(RECOMPUTE)[(column + row) % 3],
            list(PRECISION)[(column + row + row // 2) % 2],
        )
        for column, schedule in enumerate(SCHEDULES)
        for row, parallelism in enumerate(PARALLELISM)
    ]


CASES = _cases()
RESULTS: dict[Case, str] = {}


def test_any_two_settings_meet() -> None:
    choices = SCHEDULES, *map(tuple, (PARALLELISM, EMBEDDINGS, RECOMPUTE, PRECISION))
    for first, second in itertools.combinations(range(len(choices)), 2):
        met = {(astuple(case)[first], astuple(case)[second]) for case in CASES}
        assert met == set(itertools.product(choices[first], choices[second]))


def training(parallelism: str, embeddings: str, precision: str) -> Training:
    """Return the training of stock, which has no recompute."""
    flags: Flags = {
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "micro_batch_size": 2,
        "train_iters": 3,
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "swiglu": True,
        "position_embedding_type": "rope",
        **PARALLELISM[parallelism],
        **EMBEDDINGS[embeddings],
        **PRECISION[precision],
    }
    return Training(RANKS, flags)


# By day a V runs with every parallelism: TP2 is part of the case with sequence parallelism, which
# needs it, and DP2 of the one with the distributed optimizer. Lines and loops have the same linear
# layers, gradients and groups as a V; 1f1b has the passes of interleaved, and v-half the placement
# of zb-v.
BY_DAY = [name for name in PARALLELISM if name not in ("TP2", "DP2")]
RUN = [c for c in CASES if IS_NIGHT or (c.schedule == "zb-v" and c.parallelism in BY_DAY)]


def shown(case: Case) -> list[pytest.MarkDecorator]:
    settings: Flags = {
        "group_query_attention": True,
        "qk_layernorm": True,
        **PARALLELISM[case.parallelism],
        **EMBEDDINGS[case.embeddings],
        **RECOMPUTE[case.recompute],
        **PRECISION[case.precision],
    }
    if case.recompute == "selective":
        settings["recompute_modules"] = ["core_attn"]  # Megatron's default for selective recompute
    return covers("A", (case.schedule,), settings)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=shown(case)) for case in RUN]
)
def test_it_is_stock_to_the_last_bit(case: Case) -> None:
    RESULTS[case] = "not stock"
    ours = RECOMPUTE[case.recompute] | {"pipeline_schedule": case.schedule}
    training(case.parallelism, case.embeddings, case.precision).resume_as_stock(**ours)
    RESULTS[case] = "bitwise"


# ---- settings outside the matrix: fp16, frozen weights, recompute, the split of the backward pass


PIPELINE = Training(2, {"pipeline_model_parallel_size": 2, "train_iters": 3})
FP16: Flags = {
    "num_layers": 4,
    "fp16": True,
    "initial_loss_scale": 2**20,
    "loss_scale_window": 3,
    "hysteresis": 1,
    "train_iters": 8,
}


@pytest.mark.parametrize(
    "schedule", ["1f1b", *at_night("zb-auto", "v-half", "zb-v", "interleaved")]
)
def test_fp16_skips_the_steps_that_stock_skips(schedule: str) -> None:
    training = replace(PIPELINE.but(**FP16), saved_at=3)
    assert 0 in training.saved()[0][0].norms[3:], "no step was skipped"
    training.resume_as_stock(pipeline_schedule=schedule)


def with_frozen_weights(*args: Any, **kwargs: Any) -> Any:
    """Build a model in which the embedding and one linear layer of each transformer layer are
    frozen."""
    model = model_provider(*args, **kwargs)
    for name, parameter in model.named_parameters():
        if "linear_fc1" in name or "word_embeddings" in name:
            parameter.requires_grad_(False)
    return model


FROZEN = replace(PIPELINE.but(**EMBEDDINGS["untied"]), build=with_frozen_weights)


@pytest.mark.parametrize("schedule", ["zb-auto", "zb-v", "interleaved-zb"])
def test_frozen_weights(schedule: str) -> None:
    """Trainings with frozen weights equal stock's. Frozen weights have no W. The first layer's
    input has no gradient, so linear layers that read it have no I either."""
    FROZEN.resume_as_stock(pipeline_schedule=schedule)


@pytest.mark.parametrize("schedule", ["zb-v", *at_night("zb-auto")])
def test_recompute_runs_each_layer_twice(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under full recompute a layer's forward pass runs twice for each microbatch. If the backward
    pass were split in torch's autograd graph, recompute would need a third forward pass of every
    linear layer."""
    forward = TransformerLayer.forward

    def counted(layer: TransformerLayer, *args: Any, **kwargs: Any) -> Any:
        with (tmp_path / f"layer {layer.layer_number}").open("a") as file:
            file.write("x")
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(TransformerLayer, "forward", counted)
    PIPELINE.run(**RECOMPUTE["full"], train_iters=2, pipeline_schedule=schedule)
    microbatches = PIPELINE.global_batch_size
    counts = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert counts == {f"layer {number}": 2 * 2 * microbatches for number in (1, 2, 3, 4)}


@pytest.mark.parametrize("schedule", ["zb-v", *at_night("gis")])
def test_a_chunks_reduction_starts_right_after_its_last_w(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient reduction of a chunk starts right after the chunk's last W, so that passes of
    the rank's other chunk hide it."""
    run, start = ModelStage.backward_weight, DistributedDataParallel.start_grad_sync

    def note(text: str) -> None:
        with (tmp_path / f"rank {dist.get_rank()}").open("a") as file:
            file.write(text + "\n")

    def noted_run(stage: ModelStage, microbatch: int) -> None:
        run(stage, microbatch)
        note(f"W {id(stage._model)}")

    def noted_start(chunk: DistributedDataParallel, *unused: Any) -> None:
        note(f"reduction {id(chunk)}")
        start(chunk, *unused)

    monkeypatch.setattr(ModelStage, "backward_weight", noted_run)
    monkeypatch.setattr(DistributedDataParallel, "start_grad_sync", noted_start)
    ours: Flags = {"overlap_grad_reduce": True, "pipeline_schedule": schedule}
    replace(PIPELINE, ranks=RANKS).run(train_iters=1, **ours)
    microbatches = 4
    for rank in range(RANKS):
        events = (tmp_path / f"rank {rank}").read_text().splitlines()
        reductions = [n for n, event in enumerate(events) if event.startswith("reduction")]
        assert len(reductions) == 2
        for n in reductions:
            chunk = events[n].split()[1]
            assert events[n - 1] == f"W {chunk}"
            assert events[:n].count(f"W {chunk}") == microbatches, "W came after the reduction"
        assert "W" in events[reductions[0] + 1], "nothing is left that could hide the first"


def test_the_split_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    FROZEN.run(
        num_experts=4,
        disable_bias_linear=True,
        train_iters=2,
        pipeline_schedule="zb-v",
        pipeline_report_split=True,
    )
    lines = [line for line in capfd.readouterr().out.splitlines() if "without a W" in line]
    assert len(lines) == 2, "once a rank, after the first step"
    first, last = lines
    assert first.startswith("megatron_ext: pipeline rank 0: W has 9")
    # each rank has two layers with four experts each
    assert "8 frozen" in first and "9 frozen" in last
    assert "2 decoder.layers.*.mlp.router.weight (its layer is not split" in first
    assert "1 of embeddings" in last and "norms" in last


@nightly("test_reported_cases.py has both, and test_placements.py is stock's without a limit")
@pytest.mark.parametrize("room", [True, False])
def test_the_output_layer_waits_for_w_only_where_its_logits_have_room(
    room: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The output layer's weight gradient is deferred to W only if there is memory for its logits.
    Under the schedule zb-h1 all ranks store equally many activations, so the last rank has memory
    for logits only if a limit in bytes allows more than that. The numbers are stock's with and
    without such a limit."""
    limit = {"pipeline_memory_limit": "60GiB"} if room else {}
    ours: Flags = {"pipeline_schedule": "zb-h1", "pipeline_report_split": True, **limit}
    PIPELINE.start_as_stock(**ours)
    lines = [line for line in capfd.readouterr().out.splitlines() if "without a W" in line]
    assert len(lines) == 2
    assert "output layer" not in lines[0]
    assert ("output layer (its logits" in lines[1]) != room


# ---- the table of docs/compatibility.md


def test_the_table_in_the_docs_is_of_these_runs() -> None:
    if len(RESULTS) < len(CASES):
        pytest.skip("not all cases were run")
    rows = [
        [
            parallelism,
            *(
                f"{case.embeddings}, {case.recompute}, {case.precision}"
                + ("" if RESULTS[case] == "bitwise" else f": {RESULTS[case]}")
                for case in CASES
                if case.parallelism == parallelism
            ),
        ]
        for parallelism in PARALLELISM
    ]
    check_written("matrix", table(["", *SCHEDULES], rows))
