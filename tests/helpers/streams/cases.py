"""Trainings and steps on emulated streams, which together switch on each feature once."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

import megatron_ext
from megatron_ext.compile.registry import FamilyEntry, entries
from megatron_ext.features.offload.runtime import offload
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.schedule.problem import CONFLICTS
from tests.helpers import megatron_runs
from tests.helpers import transformer_engine_on_cpu as on_cpu
from tests.helpers.adversary import streams
from tests.helpers.callers import first_and_last, named_parameters, small_config, whole_step
from tests.helpers.combinations import pairwise
from tests.helpers.megatron_runs import EXPERTS, SCRIPT, losses, model_flags, train
from tests.helpers.optimizer_instances import means_after_a_failed_step, use_einops
from tests.helpers.ranks import HANGS, lasting_folder, run_ranks, values
from tests.helpers.transformer_engine_gpt import provide, use_transformer_engine

Flags = Mapping[str, object]

ITERATIONS = 2
BAD_GRADIENTS = (
    Path(__file__).parents[2] / "pipeline" / "scripts" / "pretrain_gpt_with_bad_gradients.py"
)

UNTIED: Flags = {"untie_embeddings_and_output_weights": True}
MIXTURE: Flags = {**EXPERTS, **UNTIED}
SHARED: Flags = {"moe_shared_expert_intermediate_size": 32}
SIDE_STREAM: Flags = {**SHARED, "moe_shared_expert_overlap": True}
EXPERT_PARALLEL: Flags = {**MIXTURE, "expert_model_parallel_size": 2}
PAIRS: Flags = {
    **EXPERT_PARALLEL,
    **SHARED,
    "bf16": True,
    "overlap_moe_expert_parallel_comm": True,
}
TENSOR: Flags = {"tensor_model_parallel_size": 2}
SEQUENCE: Flags = {**TENSOR, "sequence_parallel": True}
OVERLAPS: Flags = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
RECOMPUTE: Flags = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
VALIDATED: Flags = {
    **UNTIED,
    "pipeline_post_validation": True,
    "train_iters": 5,
    "clip_grad": 10.0,  # above the gradient norms of all iterations but those in BAD
    "log_interval": 10,  # steps do not overlap at an iteration that is logged
    "no_check_for_nan_in_loss_and_grad": True,
    "rerun_mode": "disabled",
}
# Settings under which costs are measured in the first four iterations. The file is in a folder that
# git ignores.
MEASURED: Flags = {"pipeline_costs": "profile:build/streams/costs.json", "train_iters": 5}
BAD = {3: 100.0}  # factor of the gradients, by iteration


def leaving(how: str) -> Flags:
    """Return the flags of activation offload with the value ``how``."""
    flags = {
        "pipeline_activation_offload": how,
        "pipeline_costs": "f=10,i=12,w=8,comm=1,d2h=3,h2d=3",
    }
    return flags | ({"pipeline_memory_limit": "0.75x"} if how == "fit" else {})


@dataclass(frozen=True)
class Case:
    """A run on emulated streams. The run fails if fewer than ``crossings`` accesses of a rank cross
    streams. This bound is at most half of the number that was counted when the case was written."""

    run: Callable[[], None]
    crossings: int

    def run_emulated(self) -> None:
        """Run the case on emulated streams, and fail if the checks of a rank find anything."""
        with streams(self.crossings):
            self.run()


def training(ranks: int, schedule: str, *flags: Flags, **more: object) -> Callable[[], None]:
    """Return a training on ``ranks`` ranks, at PP 2."""
    return functools.partial(_train, ranks, _flags(ranks, schedule, *flags, more))


def _flags(ranks: int, schedule: str, *parts: Flags) -> Flags:
    """Return the flags of a training whose pipelines have four microbatches a step."""
    merged: dict[str, object] = {
        "pipeline_model_parallel_size": 2,
        "train_iters": ITERATIONS,
        "pipeline_schedule": schedule,
    }
    for part in parts:
        merged |= part
    merged["global_batch_size"] = 2 * ranks // int(str(merged.get("tensor_model_parallel_size", 1)))
    return merged


def _train(ranks: int, flags: Flags) -> None:
    is_validated = "pipeline_post_validation" in flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "SMALL", 0)
        patch.setenv("BAD_GRADIENTS", json.dumps(BAD))
        # `_tables`, which reads parameters when Megatron logs, is replaced. Post-validation moves
        # the logging into the next step, when parameters are being gathered; a real training does
        # not read them there.
        patch.setattr(megatron_runs, "_tables", lambda model: {})
        if flags.get("pipeline_costs") == "profile":
            flags = {**flags, "pipeline_costs": f"profile:{lasting_folder() / 'costs.json'}"}
        if "pipeline_trace" in flags:
            folder = lasting_folder()
            flags = {**flags, "pipeline_trace": folder, "pipeline_trace_iters": "1:2"}
        runs = train(ranks, model_flags(**flags), BAD_GRADIENTS if is_validated else SCRIPT)
    assert len(losses(runs)) == flags["train_iters"]
    assert not is_validated or max(run.redone for run in runs) == len(BAD)


def transformer_engine(version: str, schedule: str, *flags: Flags) -> Callable[[], None]:
    """Return a training on 4 ranks with the stand-ins for Transformer Engine's layers."""
    return functools.partial(_train_transformer_engine, version, _flags(4, schedule, *flags))


def _train_transformer_engine(version: str, flags: Flags) -> None:
    on_cpu.fetch(version)  # the package is fetched here, where a test can still be skipped
    build = functools.partial(provide, False, False, {})

    def on_rank(rank: int) -> None:
        record_stream = torch.Tensor.record_stream
        use_transformer_engine(version)
        torch.Tensor.record_stream = record_stream  # type: ignore[method-assign]
        train(4, model_flags(**flags), model_provider=build)

    values(run_ranks(1, on_rank, timeout=HANGS, connect=False))


def callers_loop() -> None:
    """Run a step of a caller that is no Megatron script, with a model of its own."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()), megatron_ext.install(schedule="zb-v"):
            step, _ = whole_step(
                _build, named_parameters, _forward_step, _data, 2, seq_length=8, micro_batch_size=2
            )
        assert len(step) == len(_data())

    values(run_ranks(2, on_rank))


def failed_step(instances: int) -> None:
    """Continue a training after a step that failed while its gradients were being reduced."""
    with pytest.MonkeyPatch.context() as patch:
        use_einops(patch)
        means_after_a_failed_step(instances)


def _build() -> list[torch.nn.Module]:
    config = small_config(4, 2, virtual_pipeline_model_parallel_size=2)
    return [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=32,
            max_sequence_length=8,
            share_embeddings_and_output_weights=False,
            vp_stage=chunk,
            **first_and_last(chunk),
        )
        for chunk in range(parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1)
    ]


def _data() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(32, (2, 8), generator=draw) for _ in range(6)]


def _forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    mask = torch.ones(1, 1, 8, 8).triu(1).bool()
    output = model(tokens, torch.arange(8).expand(2, -1), mask, labels=tokens)
    return output, lambda output: (output.mean(), {"loss": output.mean().item()})


# Cases that run by day. Each feature except overlapped passes is in one of these cases, and so is
# each of this project's waits that a trace can show, except one of overlapped passes.
CASES: dict[str, Case] = {
    "zb-h1, experts, shared ones on a stream of theirs, offload full": Case(
        training(2, "zb-h1", MIXTURE, SIDE_STREAM, leaving("full")), 1000
    ),
    "zb-v, tensor and sequence parallel, offload half": Case(
        training(4, "zb-v", SEQUENCE, leaving("half")), 1000
    ),
    # This case finds a former fault: tables used to be gathered for the passes of the vocabulary,
    # and a second time with the other parameters of their chunk, during these passes.
    "zb-v, vocabulary 2, offload fit, reductions and gathers overlapped": Case(
        training(4, "zb-v", UNTIED, OVERLAPS, leaving("fit"), pipeline_vocab_parallel=2), 500
    ),
    "zb-h1, vocabulary 1, measured costs": Case(
        training(2, "zb-h1", UNTIED, MEASURED, pipeline_vocab_parallel=1), 500
    ),
    "zb-h1, batched, reductions and gathers overlapped": Case(
        training(4, "zb-h1", OVERLAPS, pipeline_p2p="batched", pipeline_trace=True), 500
    ),
    "zb-v, slices, R": Case(
        training(2, "zb-v", pipeline_slices=2, pipeline_recompute="first:2"), 500
    ),
    "zb-v, post-validation, reductions and gathers overlapped": Case(
        training(4, "zb-v", OVERLAPS, VALIDATED), 500
    ),
    "zb-h1, Transformer Engine's stand-ins, tensor and sequence parallel": Case(
        transformer_engine(on_cpu.VERSIONS[0], "zb-h1", SEQUENCE), 500
    ),
    "zb-v, a caller's loop": Case(callers_loop, 100),
    "a failed step": Case(functools.partial(failed_step, 1), 1),
    "a failed step, two optimizer instances": Case(functools.partial(failed_step, 2), 1),
}

# Cases that run at night. With experts in a latent space, operands of W are computed on the
# all-to-all's stream.
AT_NIGHT: dict[str, Case] = {
    "zb-v, pairs with experts, reductions and gathers overlapped": Case(
        training(4, "zb-v", PAIRS, OVERLAPS), 500
    ),
    "zb-h1, tensor parallel, recompute": Case(training(4, "zb-h1", TENSOR, RECOMPUTE), 500),
    "zb-v, Transformer Engine's stand-ins, pairs with experts in a latent space": Case(
        transformer_engine(on_cpu.VERSIONS[-1], "zb-v", PAIRS, {"moe_latent_size": 16}), 500
    ),
}


# At night each family meets each setting, and any two settings of different kinds meet.
_KINDS: tuple[Mapping[str, Flags], ...] = (
    {
        "whole": {},
        "vocabulary 1": {**UNTIED, "pipeline_vocab_parallel": 1},
        "vocabulary 2": {**UNTIED, "pipeline_vocab_parallel": 2},
        "post-validation": VALIDATED,
    },
    {
        "stays": {},
        "half leaves": leaving("half"),
        "all leaves": leaving("full"),
        "fits": leaving("fit"),
        "recompute": RECOMPUTE,
        "R": {"pipeline_recompute": "first:1"},
        "slices": {"pipeline_slices": 2},
    },
    {
        "async": {},
        "batched": {"pipeline_p2p": "batched"},
    },
    {
        "alone": {},
        "tensor": TENSOR,
        "tensor and sequence": SEQUENCE,
        "replicas": OVERLAPS,
        "experts": {**MIXTURE, **SIDE_STREAM},
        "experts of two ranks": {**EXPERT_PARALLEL, **SIDE_STREAM, **OVERLAPS},
        "pairs": PAIRS,
    },
)


def night_cases() -> dict[str, Case]:
    """Return cases in which each family meets each setting that it can be combined with."""
    product = [
        (entry, *settings)
        for entry in entries().values()
        for settings in itertools.product(*_KINDS)
        if _go_together(entry, settings)
    ]
    return {
        f"{entry.name}, {', '.join(settings)}": Case(_night(entry, settings), 100)
        for entry, *settings in pairwise(product)
    }


def _night(entry: FamilyEntry, settings: Sequence[str]) -> Callable[[], None]:
    flags = [kind[name] for kind, name in zip(_KINDS, settings, strict=True)]
    ranks = 2 if settings[-1] in ("alone", "experts") else 4
    return training(ranks, entry.name, *flags, num_layers=max(4, entry.place(2).stages))


def _go_together(entry: FamilyEntry, settings: Sequence[str]) -> bool:
    """Return whether no refusal forbids the settings
    (`megatron_ext.schedule.problem.CONFLICTS`)."""
    options = {_OPTIONS[name] for name in settings if name in _OPTIONS}
    place = entry.place(2)
    return not (
        any(options.issuperset(conflict.options) for conflict in CONFLICTS)
        or ("pairs" in options and not entry.traits.keeps_pairs)
        or ("steps_overlap" in options and not _gains_by_validation(entry, options))
        or ("vocab_parallel" in options and place.name not in ("line", "v"))
        # A family with one chunk a rank cannot offload enough to fit its limit.
        or ("fits" in settings and place.chunks == 1)
        # Megatron refuses overlapped passes together with recompute
        or {"pairs", "recompute"} <= {*settings}
        # With these settings the steps of some families do not overlap.
        or {"post-validation", "recompute"} <= {*settings}
        or {"post-validation", "experts"} <= {*settings}
        or {"post-validation", "experts of two ranks"} <= {*settings}
    )


def _gains_by_validation(entry: FamilyEntry, options: Set[str]) -> bool:
    """Return whether post-validation lets the steps of this family overlap on two ranks. On a loop,
    and with recompute, they do not."""
    return entry.traits.steps_overlap and entry.name != "loop-auto" and "recompute" not in options


_OPTIONS = {
    "vocabulary 1": "vocab_parallel",
    "vocabulary 2": "vocab_parallel",
    "post-validation": "steps_overlap",
    "half leaves": "activation_offload",
    "all leaves": "activation_offload",
    "fits": "activation_offload",
    "R": "recompute",
    "slices": "slices",
    "batched": "p2p",
    "pairs": "pairs",
}
