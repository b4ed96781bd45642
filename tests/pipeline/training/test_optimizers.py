"""Tests of optimizers and gradient settings that recipes use, compared with stock Megatron to the
last bit.

Weights are drawn by their names, so that a model has the same initial weights under any placement.
Compared are losses, parameters and the whole optimizer state.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import megatron_runs
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import Run, assert_same, losses
from tests.helpers.optimizers_on_cpu import EINOPS, FUSED_ADAM, MUON, Package
from tests.helpers.ranks import HANGS, run_ranks, values
from tests.helpers.trainings import Training

Flags = dict[str, object]

SAVED_AT = 2

SHARDED: Flags = {
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "dist_ckpt_optim_fully_reshardable": True,
}
AVERAGED: Flags = {"ddp_average_in_collective": True}
OFFLOADED: Flags = {
    **SHARDED,
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
}
# There are as many expert-parallel ranks as replicas, so gradients of experts are averaged by a
# factor and not by a collective.
EXPERTS: Flags = {**megatron_runs.EXPERTS, "expert_model_parallel_size": 2}
TENSOR: Flags = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
GATHERED_EARLY: Flags = {
    **SHARDED,
    "overlap_param_gather_with_optimizer_step": True,
    "ckpt_format": "torch",  # early gathers require this format, and virtual stages
}
SETTINGS: dict[str, Flags] = {
    "averaged": AVERAGED,
    "averaged, sharded": SHARDED | AVERAGED,
    "offloaded": OFFLOADED,
    "offloaded, averaged": OFFLOADED | AVERAGED,
    "offloaded, averaged, experts": OFFLOADED | AVERAGED | EXPERTS,
    "gathered early, experts": GATHERED_EARLY | AVERAGED | EXPERTS,
    "gradients in bf16": {**SHARDED, "grad_reduce_in_bf16": True},
    "gathered early": GATHERED_EARLY,
    "another rate for embeddings": {"bf16": True, "decoupled_lr": 1e-3},
}
SCHEDULES = ("zb-h1", "interleaved-zb", "zb-v")


# --- optimizers of other packages

# Each of these trainings runs in a process of its own, in which Megatron finds the package of the
# optimizer.

FUSED: Flags = {
    **SHARDED,
    **AVERAGED,
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
IN_FP16: Flags = {**FUSED, "main_grads_dtype": "fp32", "main_params_dtype": "fp16"}
WITH_MUON: Flags = {"bf16": True, "optimizer": "muon", "overlap_grad_reduce": True}
BY_LAYERS: Flags = {
    **WITH_MUON,
    "optimizer": "dist_muon",
    "dist_ckpt_optim_fully_reshardable": True,
}
OTHERS: dict[str, tuple[Package, Flags]] = {
    "two instances": (EINOPS, {**SHARDED, "num_distributed_optimizer_instances": 2}),
    "two instances, averaged": (
        EINOPS,
        {**SHARDED, **AVERAGED, "num_distributed_optimizer_instances": 2},
    ),
    "fused, states in bf16": (FUSED_ADAM, FUSED),
    "fused, main parameters in fp16": (FUSED_ADAM, IN_FP16),
    "muon": (MUON, WITH_MUON),
    "muon by layers, averaged": (MUON, {**BY_LAYERS, **AVERAGED}),
    "muon by layers, gathers overlapped": (MUON, {**BY_LAYERS, "overlap_param_gather": True}),
    "muon by layers, averaged, experts": (MUON, {**BY_LAYERS, **AVERAGED, **EXPERTS}),
    "muon by layers, tensor parallel": (MUON, {**BY_LAYERS, **TENSOR}),
    "fused, states in bf16, experts": (FUSED_ADAM, {**FUSED, **EXPERTS}),
}


def training(setting: str) -> Training:
    """Return a training on four ranks: two pipeline ranks, and two replicas unless ``setting`` uses
    these ranks for other parallelism."""
    flags: Flags = {
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "untie_embeddings_and_output_weights": True,
        "train_iters": 3,
        **(SETTINGS.get(setting) or OTHERS[setting][1]),
    }
    return Training(4, flags, SAVED_AT, build=drawn_by_name)


def virtual_of(setting: str, schedule: str) -> dict[str, int]:
    """Return the virtual stages that stock must have for a comparison. A scaled state has one scale
    for the part of a tensor on a rank, so its values depend on them."""
    scaled = setting == "fused, main parameters in fp16" and schedule != "zb-h1"
    if scaled or setting.startswith("gathered early"):
        return {"num_virtual_stages_per_pipeline_rank": 2}
    return {}


def shown(setting: str, schedule: str) -> Any:
    """Return a test case with a mark of the recipes' settings that it covers."""
    flags = dict(SETTINGS.get(setting) or OTHERS[setting][1])
    in_bf16 = "grad_reduce_in_bf16" in flags or flags.get("main_grads_dtype") == "bf16"
    names = {
        "precision": "bf16" if flags.get("bf16") else "fp32",
        "grad_reduce_in_fp32": not in_bf16,
        "check_for_nan_in_grad": True,  # Megatron's default
        **{name: flags[name] for name in SHOWN if name in flags},
        "average_in_collective": "ddp_average_in_collective" in flags,
    }
    kinds = {"zb-h1": "line", "interleaved-zb": "loop", "zb-v": "v"}
    grade = "B" if setting.startswith("fused") else "A"
    mark = pytest.mark.covers(grade, (kinds[schedule],), **names)
    return pytest.param(setting, schedule, marks=mark)


SHOWN = (
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    *("overlap_param_gather_with_optimizer_step", "num_distributed_optimizer_instances"),
    *("use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype"),
    *("exp_avg_sq_dtype", "optimizer_cpu_offload", "optimizer", "ckpt_format"),
    *("expert_model_parallel_size", "num_experts", "moe_token_dispatcher_type"),
    *("tensor_model_parallel_size", "sequence_parallel"),
)

CASES = [
    (setting, schedule)
    for setting in SETTINGS
    for schedule in SCHEDULES
    # Megatron refuses early gathers without virtual stages
    if not ("gathered" in setting and schedule == "zb-h1")
]
# Early gathers require a checkpoint format that a V can neither load nor save.
SAVING = [case for case in CASES if not ("gathered" in case[0] and case[1] == "zb-v")]
DAY = ("offloaded, averaged", "zb-v")
BY_DAY = [case for case in CASES if case == DAY or at_night(case)]


@pytest.mark.parametrize(("setting", "schedule"), [shown(*case) for case in BY_DAY])
def test_it_is_stock_to_the_last_bit(setting: str, schedule: str) -> None:
    runs = training(setting).run(pipeline_schedule=schedule)
    assert {rank.schedule for rank in runs} == {"PipelineStep"}
    assert_same(runs, training(setting).saved(**virtual_of(setting, schedule))[0])


GLOOS_GATHERS = (
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
)


class SlowGather:
    """Gather that gloo finishes only when it is waited for: the shards are read at the start, and
    the results are written at the wait."""

    def __init__(self, begin: Callable[..., Any], outputs: list[Any], inputs: list[Any]) -> None:
        self._gathered = [torch.empty_like(output) for output in outputs]
        self._outputs = outputs
        self._works = [
            begin(gathered, shard.clone())
            for gathered, shard in zip(self._gathered, inputs, strict=True)
        ]

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        for output, gathered in zip(self._outputs, self._gathered, strict=True):
            output.copy_(gathered)
        return True


@contextlib.contextmanager
def slow_gathers() -> Iterator[None]:
    """Make gathers of ranks that are forked in the context read at their start and write at their
    wait."""
    begin = torch.distributed.ProcessGroup._allgather_base

    def start(group: Any, outputs: Any, inputs: Any, *options: Any) -> SlowGather:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return SlowGather(functools.partial(begin, group), outputs, inputs)

    with pytest.MonkeyPatch.context() as patched:
        for name in GLOOS_GATHERS:
            patched.setattr(torch.distributed.ProcessGroup, name, start, raising=False)
        yield


@pytest.mark.parametrize("replicas", [2, *at_night(4)])
@pytest.mark.parametrize("schedule", [None, *at_night("interleaved-zb", "zb-v")])
def test_experts_that_are_gathered_early_have_stepped(schedule: str | None, replicas: int) -> None:
    """With ``--overlap-param-gather-with-optimizer-step``, experts have taken their optimizer step
    before their parameters are gathered. Megatron starts the gather of the first chunk's experts
    before their step. gloo writes at the end of a gather all that it has read, the rank's own shard
    too, so a slow gather used to undo the step, under stock too."""
    flags: Flags = {**EXPERTS, "train_iters": 2, "num_virtual_stages_per_pipeline_rank": 2}
    if schedule is not None:
        flags = {**EXPERTS, "train_iters": 2, "pipeline_schedule": schedule}
    early = replace(training("gathered early"), ranks=2 * replicas).but(**flags)
    expected = early.run(overlap_param_gather_with_optimizer_step=None)
    with slow_gathers():
        assert_same(early.run(), expected)


def resumed(setting: str, folder: Path, **more: object) -> list[Run]:
    # --ckpt-step does not work with the older format
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    return training(setting).run(load=folder, **more)


@nightly("test_checkpoints has the distributed optimizer resumed elsewhere by day")
@pytest.mark.parametrize(("setting", "schedule"), SAVING)
def test_a_checkpoint_of_stocks_is_resumed(setting: str, schedule: str) -> None:
    whole, folder = training(setting).saved(**virtual_of(setting, schedule))
    runs = resumed(setting, folder, pipeline_schedule=schedule)
    assert len(losses(runs)) == len(losses(whole)) - SAVED_AT
    assert_same(runs, whole)


@nightly("test_checkpoints has the distributed optimizer resumed elsewhere by day")
@pytest.mark.parametrize(("setting", "schedule"), SAVING)
def test_stock_resumes_a_checkpoint_of_ours(setting: str, schedule: str, tmp_path: Path) -> None:
    saving: Flags = {"save": tmp_path, "save_interval": SAVED_AT}
    training(setting).run(pipeline_schedule=schedule, **saving)
    virtual = virtual_of(setting, schedule)
    assert_same(resumed(setting, tmp_path, **virtual), training(setting).saved(**virtual)[0])


OTHERS_BY_DAY = [
    case for case in itertools.product(OTHERS, SCHEDULES) if case == ("muon", "zb-v") or IS_NIGHT
]


@pytest.mark.parametrize(("setting", "schedule"), [shown(*case) for case in OTHERS_BY_DAY])
def test_optimizers_of_other_packages(setting: str, schedule: str, tmp_path: Path) -> None:
    """Trainings with optimizers of other packages equal stock's, from the start and resumed from a
    checkpoint of stock."""
    package = OTHERS[setting][0]
    folder = package.fetch()
    virtual = virtual_of(setting, schedule)
    # Megatron itself cannot load the states that it saves with main parameters in bf16, so 1f1b
    # stands for stock.
    stocks: Flags = {**virtual}
    if setting.startswith("fused, states in bf16"):
        stocks = {"pipeline_schedule": "1f1b"}

    def both(rank: int) -> list[list[Run]]:
        package.use(folder)
        whole, saved = training(setting).saved(**virtual)
        ours: Flags = {"pipeline_schedule": schedule, "save": tmp_path, "save_interval": SAVED_AT}
        return [
            whole,
            training(setting).run(**ours),
            resumed(setting, saved, pipeline_schedule=schedule),
            resumed(setting, tmp_path, **stocks),
        ]

    ((whole, *runs),) = values(run_ranks(1, both, timeout=4 * HANGS, connect=False))
    for made in runs:
        assert_same(made, whole)
        assert_one_rank_has_each(made)


def assert_one_rank_has_each(runs: list[Run]) -> None:
    """Assert that exactly one rank records each piece of the state, not counting copies and step
    counts. `megatron-ext parity` relies on this: several optimizer instances hold copies of a
    piece, and some pieces exist on one data-parallel rank only."""
    pieces = Counter(
        (piece.name, piece.index, piece.place)
        for rank in runs
        for piece in rank.state
        if piece.shape and not piece.is_copy
    )
    everything = {
        (piece.name, piece.index, piece.place)
        for rank in runs
        for piece in rank.state
        if piece.shape
    }
    assert pieces.keys() == everything and set(pieces.values()) == {1}
