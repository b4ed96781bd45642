"""Tests of trainings of a GPT with Transformer Engine's linear layers: our schedules equal stock to
the last bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.features.offload.runtime import offload
from megatron_ext.features.offload.runtime.offload import OffloadedStep
from tests.helpers import megatron_runs
from tests.helpers import transformer_engine_on_cpu as on_cpu
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.covers.marks import covers
from tests.helpers.megatron_runs import losses
from tests.helpers.trainings import Training
from tests.helpers.transformer_engine_gpt import provide, use_transformer_engine

OLDEST, *_, NEWEST = on_cpu.VERSIONS


OVERLAPPED: dict[str, object] = {"bf16": True, "overlap_grad_reduce": True}
LOOP: dict[str, object] = {
    **OVERLAPPED,
    "num_virtual_stages_per_pipeline_rank": 2,
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
}
EXPERTS: dict[str, object] = {**megatron_runs.EXPERTS, "expert_model_parallel_size": 2}

V: dict[str, object] = {
    **EXPERTS,
    **OVERLAPPED,
    "untie_embeddings_and_output_weights": True,
    "recompute_granularity": "selective",
}
PAIRS: dict[str, object] = {
    **EXPERTS,
    "bf16": True,
    "num_virtual_stages_per_pipeline_rank": 2,
    "moe_shared_expert_intermediate_size": 32,
}
PAIRED: dict[str, object] = {"overlap_moe_expert_parallel_comm": True}
REPEATED: dict[str, object] = {
    "mtp_num_layers": 2,
    "mtp_use_repeated_layer": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}

# By setting: the number of ranks, our schedule, and flags of both trainings.
SETTINGS: dict[str, tuple[int, str, dict[str, object]]] = {
    "overlapped": (2, "zb-h1", OVERLAPPED),
    "overlapped, fused": (2, "zb-h1", OVERLAPPED),
    "tensor and sequence parallel": (
        4,
        "zb-h1",
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "full recompute": (
        2,
        "zb-h1",
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "loop, distributed optimizer, fused": (
        4,
        "interleaved-zb",
        LOOP,
    ),
    "experts one by one": (4, "zb-h1", EXPERTS),
    "experts one by one, overlapped, fused": (4, "zb-h1", EXPERTS | OVERLAPPED),
    "experts, grouped": (4, "zb-h1", EXPERTS),
    "experts, grouped, biases, recompute": (
        4,
        "zb-h1",
        {
            **EXPERTS,
            "disable_bias_linear": None,
            "no_bias_dropout_fusion": True,
            "no_bias_gelu_fusion": True,
            "recompute_granularity": "selective",
        },
    ),
    "experts, grouped, shared, loop, distributed optimizer, fused": (
        4,
        "interleaved-zb",
        {**EXPERTS, **LOOP, "moe_shared_expert_intermediate_size": 32},
    ),
    "experts, grouped, in a latent space": (
        4,
        "zb-h1",
        {**EXPERTS, "moe_latent_size": 16, "moe_shared_expert_intermediate_size": 32},
    ),
    "experts, grouped, loop, recompute": (
        4,
        "interleaved-zb",
        {
            **EXPERTS,
            "num_virtual_stages_per_pipeline_rank": 2,
            "recompute_granularity": "selective",
        },
    ),
    "V, experts, grouped, recompute, fused": (4, "zb-v", V),
    "V, experts, grouped, in a latent space": (4, "zb-v", V | {"moe_latent_size": 16}),
    "experts, grouped, shared, loop, pairs": (4, "interleaved-zb", PAIRS),
    "experts, grouped, shared, loop, pairs, delayed": (4, "interleaved-zb", PAIRS),
    "V, experts, grouped, recompute, fused, pairs, delayed": (4, "zb-v", V),
    "multi-token prediction, repeated": (2, "zb-h1", REPEATED),
    "multi-token prediction, repeated, loop, overlapped, fused": (
        2,
        "interleaved-zb",
        {**REPEATED, **OVERLAPPED, "num_virtual_stages_per_pipeline_rank": 2},
    ),
}


# Settings that run only at night, because other settings above contain them and more.
NIGHTLY = (
    "overlapped",
    "overlapped, fused",
    "loop, distributed optimizer, fused",
    "experts one by one",
    "experts, grouped",
    "experts, grouped, in a latent space",
    "experts, grouped, loop, recompute",
    "V, experts, grouped, recompute, fused",
    "V, experts, grouped, in a latent space",
    *(setting for setting in SETTINGS if "prediction" in setting or "pairs" in setting),
)


def case(version: str, setting: str) -> Any:
    _, schedule, flags = SETTINGS[setting]
    more: dict[str, Any] = {"transformer_impl": "transformer_engine"}
    if "fused" in setting:
        more["gradient_accumulation_fusion"] = True
    if "grouped" in setting:
        more |= {"moe_grouped_gemm": True, "recompute_modules": ["moe_act"]}
    if "pairs" in setting:
        more |= PAIRED
    if "delayed" in setting:
        more["delay_wgrad_compute"] = True
    if "recompute_granularity" not in flags:
        more.pop("recompute_modules", None)
    return pytest.param(version, setting, marks=covers("B", (schedule,), flags, **more))


def train_both(version: str, setting: str, **more: object) -> None:
    """Train stock and our schedule with the settings ``more``, and assert that they are equal."""
    on_cpu.fetch(version)  # fetched here, because only the test itself can be skipped
    ranks, schedule, given = SETTINGS[setting]
    flags = {"pipeline_model_parallel_size": 2, "train_iters": 2, **given}
    if "pairs" in setting:
        more |= PAIRED
        flags |= PAIRED if "loop" in setting else {}  # Megatron overlaps passes only under loops
    build = functools.partial(provide, "fused" in setting, "grouped" in setting)
    # This setting is made in the config, as its flag requires a GPU.
    delays = {"delay_wgrad_compute": True} if "delayed" in setting else {}

    stock = Training(ranks, flags, build=functools.partial(build, {}))
    world = functools.partial(use_transformer_engine, version)
    ours = replace(stock, build=functools.partial(build, delays), world=world)
    own = {"pipeline_schedule": schedule, "pipeline_report_split": True, **more}
    assert len(losses(ours.start_as(stock, **own))) == 2


@pytest.mark.parametrize(
    ("version", "setting"),
    [
        case(OLDEST, "overlapped"),
        # by day test_transformer_engine.py tests the oldest version's layers of experts
        *at_night(case(OLDEST, "experts, grouped, biases, recompute")),
        *(case(NEWEST, setting) for setting in SETTINGS if IS_NIGHT or setting not in NIGHTLY),
    ],
)
def test_training_is_stocks_to_the_last_bit(
    version: str, setting: str, capfd: pytest.CaptureFixture[str]
) -> None:
    train_both(version, setting)
    reports = [line for line in capfd.readouterr().out.splitlines() if "without a W" in line]
    assert len(reports) == 2
    assert not any("linear" in report for report in reports), reports


@nightly("test_recompute.py has them with local layers")
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize(
    "setting",
    [
        "overlapped, fused",
        "tensor and sequence parallel",
        "experts, grouped, biases, recompute",
        "multi-token prediction, repeated",
    ],
)
def test_recomputed_passes(version: str, setting: str) -> None:
    train_both(version, setting, pipeline_recompute="first:2")


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b"])
def test_its_activations_leave_for_the_host(schedule: str) -> None:
    """Trainings that offload activations of Transformer Engine's layers equal stock. An offloaded
    weight comes back as another object than the layer's weight. Only the layer's weight has
    main_grad, to which the whole backward pass under 1f1b adds."""
    on_cpu.fetch(NEWEST)
    splits = schedule == "zb-h1"
    flags = {"pipeline_model_parallel_size": 2, "train_iters": 2, **OVERLAPPED}
    finish = OffloadedStep.finish

    def finished(step: OffloadedStep) -> None:
        finish(step)
        assert (step._offload.bytes_left.total() > 0) == (step._offload.rank == 0 or splits)

    def world() -> None:
        use_transformer_engine(NEWEST)
        offload.SMALL = 0
        OffloadedStep.finish = finished  # type: ignore[assignment,method-assign]

    training = Training(2, flags, build=functools.partial(provide, True, False, {}), world=world)
    runs = training.start_as_stock(
        pipeline_schedule=schedule,
        pipeline_activation_offload="full",
        pipeline_costs="f=10,i=12,w=8,comm=1,d2h=3,h2d=3",
    )
    assert len(losses(runs)) == 2


@nightly("tests/pipeline/training/test_slices.py has them with local layers")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    "more",
    [
        {"overlap_grad_reduce": True},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ],
    ids=["fused", "tensor and sequence parallel"],
)
def test_slices(schedule: str, more: dict[str, object]) -> None:
    """Slices of a sequence train with Transformer Engine's fused weight gradients. Transformer
    Engine overwrites main_grad with the gradient of what it takes for a step's first forward pass.
    The first slice's gradient comes last, so the gradients of the other slices used to be lost."""
    on_cpu.fetch(NEWEST)
    flags = {"pipeline_model_parallel_size": 2, "train_iters": 3, **more}
    ranks = 4 if "sequence_parallel" in more else 2
    training = Training(
        ranks,
        flags,
        build=functools.partial(provide, ranks == 2, False, {}),
        world=functools.partial(use_transformer_engine, NEWEST),
    )
    reference, runs = training.beside(training, pipeline_schedule=schedule, pipeline_slices=4)
    assert losses(runs) == pytest.approx(losses(reference), rel=1e-5)
    assert len(losses(runs)) == 3
