"""Tests of Megatron's flex dispatcher of experts (DeepEP and HybridEP) under our schedules, on
gloo's all-to-all.

Several microbatches of a rank are between F and I at a time. Each has dispatcher handles of its
own, and all calls go through one buffer of the process. W needs neither handles nor buffer, because
it multiplies the layers' own tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_ext.adapter.step.pipeline_training import PipelineTraining
from megatron_ext.compile.registry import choose
from megatron_ext.runtime.stage_passes import StagePasses
from megatron_ext.schedule.action import Action
from tests.helpers import deep_ep_on_cpu
from tests.helpers.combinations import IS_NIGHT, at_night
from tests.helpers.covers.marks import covers
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import Run, assert_same, losses, model_flags, train
from tests.helpers.ranks import HANGS, run_ranks, values

RANKS, STAGES = 4, 2
Flags = dict[str, object]

EXPERTS: Flags = {
    "pipeline_model_parallel_size": STAGES,
    "expert_model_parallel_size": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 1e-2,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "train_iters": 2,
}
EXPERTS_OF_A_RANK = 2
SHARED: Flags = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True}
LOOP: Flags = {"num_virtual_stages_per_pipeline_rank": 2}
ALL_TO_ALL: Flags = {"moe_token_dispatcher_type": "alltoall"}


def flex(backend: str) -> Flags:
    return {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}


def check_handles() -> None:
    """Make the ranks of this process check in each step that F and I use a dispatcher handle and W
    does not, and that several microbatches are between F and I at a time."""
    run, run_weights = PipelineTraining._train, StagePasses._backward_weight
    run_forward = StagePasses._forward
    between: list[int] = []

    def uses() -> int:
        return sum(len(handle.uses) for handle in deep_ep_on_cpu.handles)

    def forward(passes: Any, action: Action) -> None:
        run_forward(passes, action)
        between.append(sum(len(handle.uses) == 2 for handle in deep_ep_on_cpu.handles))

    def weights(passes: Any, action: Action) -> None:
        before = uses()
        run_weights(passes, action)
        assert uses() == before, f"{action} uses the dispatcher"

    def step(training: Any, step: Any) -> Any:
        deep_ep_on_cpu.handles.clear()
        result = run(training, step)
        assert {tuple(handle.uses) for handle in deep_ep_on_cpu.handles} == {
            ("dispatch", "combine", "dispatch of gradients", "combine of gradients")
        }
        layers = sum(len(chunk.module.decoder.layers) for chunk in step.call.models)
        assert len(deep_ep_on_cpu.handles) == layers * step.call.num_microbatches
        if step.pipeline.rank() == 0:
            assert max(between) > layers, "one microbatch was done before the next began"
        assert len(deep_ep_on_cpu.buffers) == 1
        return result

    PipelineTraining._train = step  # type: ignore[assignment,method-assign]
    StagePasses._forward = forward  # type: ignore[assignment,method-assign]
    StagePasses._backward_weight = weights  # type: ignore[assignment,method-assign]


def compare(backend: str | None, flags: Flags, schedules: Sequence[str]) -> None:
    """Compare our schedules with stock's under the all-to-all dispatcher; ours use ``backend``, or
    all-to-all too if it is None."""
    given = EXPERTS | flags
    dispatcher = ALL_TO_ALL if backend is None else flex(backend)

    def run(**more: object) -> list[Run]:
        return train(RANKS, model_flags(**given, **more), model_provider=drawn_by_name)

    def on_ranks(rank: int) -> list[list[Run]]:
        deep_ep_on_cpu.use_deep_ep()
        runs = [run(**ALL_TO_ALL)]
        if backend is not None and IS_NIGHT:
            runs.append(run(**dispatcher))
        if backend is not None and "recompute_granularity" not in flags:
            check_handles()
        for schedule in schedules:
            virtual = LOOP if choose(schedule).example.name == "loop" else {}
            runs.append(run(**dispatcher, **virtual, pipeline_schedule=schedule))
        return runs

    ((stocks, *others),) = values(run_ranks(1, on_ranks, timeout=2 * HANGS, connect=False))
    assert len(losses(stocks)) == 2
    for runs in others:
        assert_same(runs, stocks)


FULL: Flags = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE: Flags = {"recompute_granularity": "selective", "recompute_modules": "moe"}
FP32: Flags = {"moe_router_dtype": "fp32"}


def case(name: str, backend: str | None, flags: Flags, *schedules: str) -> Any:
    """Return a test case under ``schedules``, with a mark of the settings that it covers. Without a
    ``backend`` no stand-in takes part."""
    given = EXPERTS | (ALL_TO_ALL if backend is None else flex(backend)) | flags
    marks = covers("A" if backend is None else "B", schedules, given)
    return pytest.param(backend, flags, schedules, id=name, marks=marks)


OF_EACH_KIND = ("zb-h1", "interleaved-zb", "zb-v")


@pytest.mark.parametrize(
    ("backend", "flags", "schedules"),
    [
        case("DeepEP, a V", "deepep", {}, "zb-v"),
        *at_night(
            case("DeepEP", "deepep", {}, "1f1b", "zb-h1", "interleaved-zb", "v-half"),
            case("DeepEP, full recompute", "deepep", FULL | FP32, *OF_EACH_KIND),
            case("HybridEP", "hybridep", {}, *OF_EACH_KIND),
            case("HybridEP, recompute", "hybridep", SELECTIVE, *OF_EACH_KIND),
            case("DeepEP, shared expert", "deepep", SHARED, *OF_EACH_KIND),
            case("shared expert", None, SHARED, *OF_EACH_KIND),
        ),
    ],
)
def test_trainings_are_stocks_to_the_last_bit(
    backend: str | None, flags: Flags, schedules: Sequence[str]
) -> None:
    """Trainings with the flex dispatcher under our schedules are bitwise equal to stock's with the
    all-to-all dispatcher. A test at night shows that stock's two dispatchers are equal."""
    compare(backend, flags, schedules)
