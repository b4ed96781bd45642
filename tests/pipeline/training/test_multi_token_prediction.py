"""Tests of multi-token prediction under every placement, compared with stock Megatron to the last
bit.

Weights are drawn by their names, so that a model has the same initial weights under any placement:
Megatron cannot save a pipeline with tied multi-token prediction, and a V draws other weights from a
seed. Compared are losses, those of multi-token prediction and its number of right tokens, all
parameters and all optimizer tensors, and the two copies of the embedding with each other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.combinations import at_night, nightly
from tests.helpers.covers.marks import covers
from tests.helpers.documents import check_written, table
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.fetched import megatron_sources
from tests.helpers.megatron_runs import EXPERTS, evaluations, losses, predictions
from tests.helpers.trainings import Training

Flags = dict[str, object]

UNTIED: Flags = {"untie_embeddings_and_output_weights": True}
REPEATED: Flags = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
FULL: Flags = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
MODELS: dict[str, Flags] = {
    "untied, 1 depth": {**UNTIED, "mtp_num_layers": 1},
    "untied, 2 depths, bf16": {**UNTIED, "mtp_num_layers": 2, "bf16": True},
    "untied, repeated layer": {**UNTIED, **REPEATED},
    "untied, repeated layer, full recompute": {**UNTIED, **REPEATED, **FULL},
    "untied, 2 depths, full recompute, bf16": {
        **UNTIED,
        "mtp_num_layers": 2,
        **FULL,
        "bf16": True,
    },
    "untied, 1 depth, experts": {**UNTIED, **EXPERTS, "mtp_num_layers": 1},
    "untied, 2 detached depths, loss per token": {
        **UNTIED,
        "mtp_num_layers": 2,
        "mtp_detach_heads": True,
        "calculate_per_token_loss": True,
    },
    "tied, 1 depth": {"mtp_num_layers": 1},
    "tied, 2 depths, selective recompute": {
        "mtp_num_layers": 2,
        "recompute_granularity": "selective",
    },
    "tied, repeated layer, bf16": {**REPEATED, "bf16": True},
    "tied, repeated layer, full recompute": {**REPEATED, **FULL},
}
# If there is memory for its logits, the weight gradient of an untied output layer is deferred to W,
# since the last stage can then have fewer layers. Fewer layers gain nothing in models with these
# settings, whose prediction layer alone takes as long as another stage.
HEAVY = ("full recompute", "experts")
ROOM: Flags = {"pipeline_memory_limit": "60GiB"}
LINE: Flags = {"pipeline_model_parallel_layout": "Ettttt|ttt{m}L"}
LIGHT_END: Flags = {"pipeline_model_parallel_layout": "Ettt|tt|tt|t{m}L"}
NOTHING_BESIDE: Flags = {"pipeline_model_parallel_layout": "Ettt|ttt|tt|{m}L"}
PLACEMENTS: dict[str, Flags] = {
    "1f1b": {"pipeline_schedule": "1f1b"},
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "zb-h1, room": {"pipeline_schedule": "zb-h1", **ROOM, **LINE},
    "interleaved": {"pipeline_schedule": "interleaved"},
    "interleaved-zb, room": {"pipeline_schedule": "interleaved-zb", **ROOM, **LIGHT_END},
    "interleaved-zb, last stage mL": {"pipeline_schedule": "interleaved-zb", **NOTHING_BESIDE},
    "zb-v": {"pipeline_schedule": "zb-v"},
    "zb-v, room": {"pipeline_schedule": "zb-v", **ROOM, **LIGHT_END},
    "zb-v, last stage mL": {"pipeline_schedule": "zb-v", **NOTHING_BESIDE},
    "v-half": {"pipeline_schedule": "v-half"},
    "hanayo": {"pipeline_schedule": "hanayo"},
}
DAY = {
    ("untied, 2 depths, bf16", "zb-h1, room"),
    ("untied, 2 depths, bf16", "zb-v, room"),
    ("untied, repeated layer, full recompute", "interleaved-zb, room"),
    ("tied, 1 depth", "zb-h1, room"),
    ("tied, 1 depth", "zb-v"),
}
CASES = [(model, placement) for model in MODELS for placement in PLACEMENTS]
CASES = [case for case in CASES if case in DAY or at_night(case)]
RESULTS: dict[tuple[str, str], str] = {}


SIZES: Flags = {
    "pipeline_model_parallel_size": 2,
    "num_layers": 8,
    "position_embedding_type": "rope",
    "train_iters": 3,
}


def placed(placement: str, depths: object) -> Flags:
    """Return our flags of ``placement``; all depths of multi-token prediction are on the last
    stage."""
    ours = PLACEMENTS[placement]
    layout = ours.get("pipeline_model_parallel_layout")
    if layout is None:
        return ours
    return {**ours, "pipeline_model_parallel_layout": str(layout).format(m="m" * int(str(depths)))}


def training(model: str) -> Training:
    return Training(2, SIZES | MODELS[model] | {"global_batch_size": 8}, build=drawn_by_name)


def case(model: str, placement: str) -> Any:
    settings = {**MODELS[model], **PLACEMENTS[placement]}
    schedule = str(settings["pipeline_schedule"])
    return pytest.param(model, placement, marks=covers("A", (schedule,), settings))


@pytest.mark.parametrize(("model", "placement"), [case(*names) for names in CASES])
def test_it_is_stock_to_the_last_bit(
    model: str, placement: str, capfd: pytest.CaptureFixture[str]
) -> None:
    RESULTS[model, placement] = "not stock"
    ours = placed(placement, MODELS[model]["mtp_num_layers"])
    runs = training(model).start_as_stock(**ours, pipeline_report_split=True)
    assert len(losses(runs)) == len(predictions(runs)) == 3
    depths = int(str(MODELS[model]["mtp_num_layers"]))
    assert len(predictions(runs)[0]) >= depths and all(predictions(runs)[0][:depths])
    (report,) = [line for line in capfd.readouterr().out.splitlines() if "rank 1: W has" in line]
    if "tied" in model.split(","):
        assert (
            "output layer (multi-token prediction looks up in it" in report or "1f1b" in placement
        )
    elif "room" in placement and not any(heavy in model for heavy in HEAVY):
        assert "output layer" not in report
    RESULTS[model, placement] = "bitwise"


# --- multi-token prediction on the stage before the last, which has the output layer only

# On a V the model's copies of the embedding are on two ranks. A tied model has three copies, whose
# gradients Megatron adds in another order.

SEPARATED = Training(
    3,
    {
        "pipeline_model_parallel_size": 3,
        "num_layers": 4,
        "position_embedding_type": "rope",
        "train_iters": 3,
        "global_batch_size": 6,
    },
    build=drawn_by_name,
)
ON_LINE: Flags = {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_layout": "Ettt|t{m}|L"}
ON_LOOP: Flags = {
    "pipeline_schedule": "interleaved-zb",
    "pipeline_model_parallel_layout": "Et|t|t|t|{m}|L",
}
ON_V: Flags = {**ON_LOOP, "pipeline_schedule": "zb-v"}
ON_WAVE: Flags = {
    "pipeline_schedule": "hanayo",
    "pipeline_model_parallel_layout": "Et|t|t|t|||||||{m}|L",
}
WITH_EMBEDDING: Flags = {**ON_LINE, "pipeline_model_parallel_layout": "Etttt{m}||L"}
TWO_SAMPLES: Flags = {"micro_batch_size": 2, "global_batch_size": 12}
SEPARATED_CASES = [
    ("tied, 1 depth", "line", {**ON_LINE, **TWO_SAMPLES}),
    ("untied, 2 depths, full recompute, bf16", "V", ON_V),
    *at_night(
        ("tied, 1 depth", "loop", ON_LOOP),
        ("tied, repeated layer, full recompute", "line", ON_LINE),
        ("untied, repeated layer, full recompute", "loop", ON_LOOP),
        ("untied, 1 depth, experts", "V", ON_V),
        ("untied, 2 detached depths, loss per token", "first stage", WITH_EMBEDDING),
        ("untied, 1 depth", "wave", ON_WAVE),
        ("untied, 1 depth", "line, R", {**ON_LINE, "pipeline_recompute": "first:3"}),
        ("untied, 1 depth", "V, R", {**ON_V, "pipeline_recompute": "first:6"}),
        ("untied, 1 depth", "V, batched", {**ON_V, "pipeline_p2p": "batched"}),
    ),
]


def separated(model: str, ours: Flags) -> tuple[Training, Flags]:
    """Return Megatron's training of ``model`` with multi-token prediction on a stage of its own,
    and those of the flags ``ours`` that this training lacks."""
    layout = str(ours["pipeline_model_parallel_layout"])
    depths = "m" * int(str(MODELS[model]["mtp_num_layers"]))
    flags = {name: value for name, value in ours.items() if not name.startswith("pipeline_")}
    flags["pipeline_model_parallel_layout"] = layout.format(m=depths)
    return SEPARATED.but(**MODELS[model], **flags), {
        name: value for name, value in ours.items() if name not in flags
    }


@pytest.mark.parametrize(
    ("model", "ours"),
    [pytest.param(model, ours, id=f"{model}, {where}") for model, where, ours in SEPARATED_CASES],
)
def test_prediction_on_another_stage_than_the_loss_is_stock_to_the_last_bit(
    model: str, ours: Flags
) -> None:
    """Multi-token prediction on another stage than the loss equals stock to the last bit. Our
    schedules used to refuse this, because Megatron then sends the shape of each message first."""
    training, ours = separated(model, ours)
    runs = training.start_as_stock(**ours)
    assert len(losses(runs)) == len(predictions(runs)) == 3


@nightly("test_it_is_stock_to_the_last_bit has two copies on one rank of a V")
def test_three_copies_on_two_ranks_of_a_v_stay_equal() -> None:
    training, ours = separated("tied, 1 depth", ON_V)
    whole, runs = training.beside(training, **ours)
    assert losses(runs) == pytest.approx(losses(whole), rel=1e-6)
    assert losses(runs)[0] == losses(whole)[0]
    name = "embedding.word_embeddings.weight"
    for first, second in zip(runs[1].tables, runs[2].tables, strict=True):
        assert first[name] == second[name] == second["output_layer.weight"]


# --- Megatron's own model builder, initialization and checkpoints

SAVED_AT = 1
SAVED: Flags = {**UNTIED, "mtp_num_layers": 2, "eval_interval": 3, "eval_iters": 1}


STARTED = Training(2, SIZES | SAVED, SAVED_AT)


@pytest.mark.parametrize(
    ("saver", "schedule"),
    [
        (None, "zb-v"),
        *at_night(*((None, name) for name in ("interleaved-zb", "v-half", "hanayo"))),
        *at_night(("zb-v", None), ("zb-v", "zb-v"), ("zb-v", "interleaved-zb")),
    ],
)
def test_a_checkpoint_is_trained_on_anywhere(saver: str | None, schedule: str | None) -> None:
    runs = STARTED.resume_as(STARTED.saved(pipeline_schedule=saver), pipeline_schedule=schedule)
    assert predictions(runs) and evaluations(runs)


@nightly("the checkpoint's test has Megatron's own builder")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-auto"])
def test_a_line_starts_as_stock_does(schedule: str) -> None:
    STARTED.start_as_stock(pipeline_schedule=schedule)


PARALLEL: dict[str, Flags] = {
    "TP2, SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "DP2, distributed optimizer, both overlaps": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "dist_ckpt_optim_fully_reshardable": True,
    },
    "EP2": {**EXPERTS, "expert_model_parallel_size": 2},
}


@nightly("what is parallel besides meets every placement in test_matrix.py")
@pytest.mark.parametrize(
    ("setting", "schedule"),
    [
        pytest.param(setting, schedule, marks=covers("A", (schedule,), {**SAVED, **flags}))
        for setting, flags in PARALLEL.items()
        for schedule in ("zb-h1", "interleaved-zb", "zb-v")
    ],
)
def test_multi_token_prediction_with_other_parallelism(setting: str, schedule: str) -> None:
    parallel = replace(STARTED.but(**PARALLEL[setting]), ranks=4)
    parallel.resume_as_stock(pipeline_schedule=schedule)


@nightly("activations that leave for the host are test_offload_training.py's")
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_activations_leave_for_the_host(schedule: str) -> None:
    model = "untied, 2 depths, bf16"
    offload = {"pipeline_schedule": schedule, "pipeline_activation_offload": "full"}
    training(model).start_as_stock(**offload)


@nightly("test_profile.py measures costs, of models that predict one token")
@pytest.mark.parametrize("model", ["untied, 2 depths, bf16", "tied, 1 depth"])
def test_costs_are_measured(model: str, tmp_path: Path) -> None:
    """Costs of a model with multi-token prediction are measured in its training. The program is
    rebuilt with the measured costs, which decide whether the output layer's weight gradient is
    computed in I or in W."""
    ours = {"pipeline_schedule": "zb-v", "pipeline_costs": f"profile:{tmp_path / 'costs.json'}"}
    training(model).but(train_iters=6).start_as_stock(**ours)
    assert (tmp_path / "costs.json").exists()


@nightly(
    "test_packed_sequences.py has the script with it, and test_placements.py the script on a V"
)
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-zb"])
def test_the_upstream_script(schedule: str) -> None:
    script = megatron_sources() / "pretrain_gpt.py"
    runs = replace(STARTED, script=script).resume_as_stock(pipeline_schedule=schedule)
    assert predictions(runs)


# --- the copies of the embedding on the first and last stage


def test_the_copies_start_equal_on_a_v() -> None:
    """The two copies of the embedding are equal when a training on a V starts. Megatron's builder
    fills the last stage's copy with zeros, and relies on an all-reduce over the embedding group,
    which has only one rank on a V and leaves the zeros."""
    runs = STARTED.run(train_iters=1, pipeline_schedule="zb-v")
    for moment in runs[1].tables:
        assert moment.keys() == {"embedding.word_embeddings.weight", "output_layer.weight"}


SEPARATED_SAVED = Training(3, {**SEPARATED.flags, **SAVED}, SAVED_AT)
LAYOUT: Flags = {"pipeline_model_parallel_layout": "Et|t|t|t|mm|L"}
WAVE_LAYOUT: Flags = {"pipeline_model_parallel_layout": "Et|t|t|t|||||||mm|L"}


def test_the_copies_start_equal_on_two_ranks_of_a_v() -> None:
    """The copies of the embedding start equal if they are on two ranks of a V. Megatron's
    all-reduce adds the copy of multi-token prediction (zeros) to the last chunk of the first
    stage's rank, which is the output layer and not the embedding."""
    runs = SEPARATED_SAVED.but(**LAYOUT).run(train_iters=1, pipeline_schedule="zb-v")
    name = "embedding.word_embeddings.weight"
    begun, trained = zip(*(run.tables for run in runs[1:]), strict=True)
    for first, second in (begun, trained):
        assert first[name] == second[name]
    assert begun[0][name] != trained[0][name]


@nightly(
    "SEPARATED_CASES have other layouts, and test_a_checkpoint_is_trained_on_anywhere checkpoints"
)
@pytest.mark.parametrize("schedule", ["zb-v", "interleaved-zb", "hanayo"])
def test_a_checkpoint_of_stages_apart_is_trained_on(schedule: str) -> None:
    layout = WAVE_LAYOUT if schedule == "hanayo" else LAYOUT
    runs = SEPARATED_SAVED.but(**layout).resume_as_stock(pipeline_schedule=schedule)
    assert predictions(runs) and evaluations(runs)


@nightly("SEPARATED_CASES have one replica")
def test_two_replicas_of_stages_apart() -> None:
    overlaps = PARALLEL["DP2, distributed optimizer, both overlaps"]
    replicas = replace(SEPARATED_SAVED.but(**LAYOUT, **overlaps), ranks=6)
    replicas.resume_as_stock(pipeline_schedule="zb-v")


def test_the_table_in_the_docs_is_of_these_runs() -> None:
    if len(RESULTS) < len(MODELS) * len(PLACEMENTS):
        pytest.skip("not all cases were run")
    # the models, by the placements under which they are bitwise equal to stock
    models: dict[tuple[str, ...], list[str]] = {}
    for model in MODELS:
        models.setdefault(tuple(bitwise(model, starts) for starts in KINDS.values()), []).append(
            model
        )
    rows = [["; ".join(names), *cells] for cells, names in models.items()]
    check_written("multi-token prediction", table(["model", *KINDS], rows))


KINDS = {"lines": ("1f1b", "zb-h1"), "loops": ("interleaved",), "V's, waves": ("zb-v", "v-", "han")}


def bitwise(model: str, starts: tuple[str, ...]) -> str:
    """Return the placements whose names begin with one of ``starts`` and under which ``model`` was
    bitwise equal to stock."""
    return "; ".join(
        placement
        for placement in PLACEMENTS
        if placement.startswith(starts) and RESULTS[model, placement] == "bitwise"
    )
