"""Tests of speculative optimizer steps, in pieces that can be rolled back, compared with a twin
that takes stock's steps.

The FusedAdam of Apex and Transformer Engine needs a GPU. A stand-in stores its state as they do:
the count of steps in the group, as an int that is replaced, and moments that are changed in place.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, clip_grads, distrib_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_ext.features.post_validation.adapter.optimizer import (
    SpeculativeOptimizer,
    why_not,
)
from megatron_ext.features.post_validation.refusals import OPTIMIZER_REFUSALS
from megatron_ext.features.post_validation.runtime.partial_state import PartialState
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.core.optimizer.optimizer.steps import optimizer_patches
from tests.helpers.combinations import at_night
from tests.helpers.ranks import run_ranks, values

# Megatron's module is imported once here, or each rank would import it.
importlib.import_module("megatron.training.initialize")

RANKS = 2
SEQUENCE, BATCH, VOCABULARY, HIDDEN = 8, 2, 32, 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Two ranks that share a model, and the optimizer that steps it."""

    dtype: str
    ranks: str  # parallelism of the two ranks: tensor, data, pipeline or expert
    distributed: bool = False
    overlap: bool = False
    steps_by: str = "adam"  # optimizer: torch's Adam, fused, or sgd
    chained: bool = True

    def __str__(self) -> str:
        words = [self.dtype, self.ranks]
        words += ["distributed"] * self.distributed + ["overlap"] * self.overlap
        words += [self.steps_by] * (self.steps_by != "adam") + ["single"] * (not self.chained)
        return "-".join(words)

    def initialize(self) -> None:
        sizes = {
            "tensor": "tensor_model_parallel_size",
            "pipeline": "pipeline_model_parallel_size",
            "expert": "expert_model_parallel_size",
        }
        parallel_state.initialize_model_parallel(
            **({sizes[self.ranks]: RANKS} if self.ranks in sizes else {})
        )
        model_parallel_cuda_manual_seed(0)


IN_FP16 = [
    *(Case("fp16", ranks) for ranks in ("tensor", "pipeline", "expert")),
    *(Case("fp16", ranks, distributed=True) for ranks in ("tensor", "data", "pipeline", "expert")),
    Case("fp16", "data", distributed=True, overlap=True),
    Case("fp16", "pipeline", chained=False),
    Case("fp16", "data", steps_by="fused"),
    Case("fp16", "data", distributed=True, steps_by="fused"),
]
CASES = [
    *IN_FP16,  # fp16 has everything that the other types have, and a loss scale
    # By day fp32 and bf16 run only with shards on a pipeline, experts, overlapped gathers and fused
    # steps.
    *(
        at_night(*(replace(case, dtype=dtype) for case in IN_FP16 for dtype in ("fp32", "bf16")))
        or (
            Case("fp32", "pipeline", distributed=True),
            Case("fp32", "expert"),
            Case("bf16", "data", distributed=True, overlap=True),
            Case("bf16", "data", steps_by="fused"),
        )
    ),
    Case("bf16", "tensor", steps_by="sgd"),
]


class FusedAdam(torch.optim.Optimizer):
    """Stand-in for the FusedAdam of Apex and of Transformer Engine."""

    def __init__(self, params: Any, capturable: bool, adam_w_mode: bool, **named: Any) -> None:
        assert adam_w_mode and not capturable
        super().__init__(params, named)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                gradient = parameter.grad
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                deviation = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (deviation + group["eps"]))


@dataclass(frozen=True)
class Event:
    """Conditions of a step (thresholds, spoilt gradients), and whether the rank takes it before the
    verdict."""

    clip: float = 1e6
    skip: float = math.inf
    spoilt_by: float = 1.0
    spoils_experts: bool = False
    steps: bool = True

    @property
    def quiet(self) -> bool:
        return self == Event()


QUIET, CLIP = Event(), Event(clip=1e-3)
EVENTS = {
    "fp32": (CLIP, QUIET, QUIET, Event(clip=1e-3, steps=False), QUIET),
    "bf16": (CLIP, QUIET, QUIET, Event(clip=1e-3, steps=False), QUIET),
    # Two good steps occur twice, so the loss scale grows; at the second infinity it falls.
    "fp16": (
        *(Event(spoilt_by=math.inf), CLIP, QUIET, Event(spoilt_by=math.inf, steps=False)),
        *(Event(spoilt_by=math.nan), QUIET, QUIET, Event(clip=1e-3, steps=False), CLIP, QUIET),
    ),
}


class Training:
    """Model on two ranks, its optimizer, and a learning rate that falls with every step."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(1)
        pipeline = case.ranks == "pipeline"
        moe = {"num_moe_experts": 2, "expert_model_parallel_size": 2, "moe_router_topk": 2}
        config = TransformerConfig(
            num_layers=2,
            hidden_size=HIDDEN,
            num_attention_heads=2,
            tensor_model_parallel_size=RANKS if case.ranks == "tensor" else 1,
            pipeline_model_parallel_size=RANKS if pipeline else 1,
            pipeline_dtype=DTYPES[case.dtype],
            params_dtype=DTYPES[case.dtype],
            **{case.dtype: True} if case.dtype != "fp32" else {},
            **moe if case.ranks == "expert" else {},
            add_bias_linear=case.ranks != "expert",
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=True,
            masked_softmax_fusion=False,
            transformer_impl="local",
        )
        self.first = not pipeline or parallel_state.is_pipeline_first_stage()
        self.last = not pipeline or parallel_state.is_pipeline_last_stage()
        gpt = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="LayerNorm"),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=self.first,
            post_process=self.last,
            # With tied embeddings in a pipeline, the last rank's copy does not count in the norm.
            share_embeddings_and_output_weights=True,
        )
        self.gpt = gpt
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=case.distributed,
                overlap_param_gather=case.overlap,
                overlap_grad_reduce=case.overlap,
                grad_reduce_in_fp32=True,
                bucket_size=2000,
            ),
            gpt if case.dtype == "fp32" else Float16Module(config, gpt),
        )
        chain = optimizers.get_megatron_optimizer(
            OptimizerConfig(
                optimizer="sgd" if case.steps_by == "sgd" else "adam",
                lr=1e-2,
                weight_decay=0.1,
                fp16=case.dtype == "fp16",
                bf16=case.dtype == "bf16",
                params_dtype=DTYPES[case.dtype],
                initial_loss_scale=2.0**10,
                loss_scale_window=2,
                hysteresis=2,
                use_distributed_optimizer=case.distributed,
                overlap_param_gather=case.overlap,
            ),
            [self.model],
        )
        assert len(chain.chained_optimizers) == (2 if case.ranks == "expert" else 1)
        self.optimizer = chain if case.chained else chain.chained_optimizers[0]
        self.config = self.optimizer.config

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            generator.manual_seed(seed)
        shape = (BATCH, SEQUENCE)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        if not self.first:
            activations = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
            self.gpt.set_input_tensor(activations.to(self.gpt.config.params_dtype))
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        output = self.model(tokens, positions, mask)
        return output.float().square().mean()

    def passes(self, seed: int, event: Event) -> float:
        """Run the forward and backward pass on a batch drawn from ``seed``, and return the loss."""
        loss = self.forward(seed)
        on_last = dist.get_rank() == RANKS - 1
        spoilt = event.spoilt_by if on_last else 1.0
        (loss * float(self.optimizer.get_loss_scale()) * spoilt).backward()
        if event.spoils_experts and on_last:
            self.model.expert_parallel_buffers[0].grad_data[-1:] = math.inf
        self.model.finish_grad_sync()
        return loss.item()

    def zero(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def schedule(self, success: bool) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9 if success else 1.0

    @property
    def parts(self) -> list[Any]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def begin_next_step(self, seed: int) -> None:
        """Run the first passes of the next step, as far as they come before the verdict: into a
        forward pass, so that hooks have started some parameter gathers."""
        with torch.no_grad():
            if seed % 2:
                self.forward(seed)
            elif self.first:
                self.gpt.embedding.word_embeddings(torch.zeros(BATCH, SEQUENCE, dtype=torch.long))
        if self.model.ddp_config.overlap_param_gather:
            groups = self.model.bucket_groups
            assert any(group.param_gather_dispatched for group in groups)
            assert seed % 2 or any(group.param_gather_handle is not None for group in groups)

    def everything(self) -> dict[str, Any]:
        """Return everything that a step may change: tensors as their bytes, other values as they
        are."""
        with self._gathered():
            entries: dict[str, Any] = dict(self.model.named_parameters())
        for p, part in enumerate(self.parts):
            scaler = getattr(part, "grad_scaler", None)
            entries |= (
                {f"{p} {name}": value for name, value in vars(scaler).items()} if scaler else {}
            )
            for g, group in enumerate(part.optimizer.param_groups):
                entries |= {f"{p} {g} {key}": group[key] for key in group if key != "params"}
                for i, parameter in enumerate(group["params"]):
                    entries[f"{p} {g} {i}"] = parameter
                    states = part.optimizer.state.get(parameter, {"absent": True})
                    entries |= {f"{p} {g} {i} {name}": value for name, value in states.items()}
        return {name: _plain(value) for name, value in entries.items()}

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Gather parameters to look at them, and then let hooks gather them as if nothing had
        happened."""
        groups = [*self.model.bucket_groups, *self.model.expert_parallel_bucket_groups]
        dispatched = [group.param_gather_dispatched for group in groups]
        if self.model.ddp_config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)
        yield
        for group, was_dispatched in zip(groups, dispatched, strict=True):
            group.param_gather_dispatched = was_dispatched


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def differing(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        name
        for name in first | other
        if name not in first or name not in other or first[name] != other[name]
    ]


@contextlib.contextmanager
def platform(case: Case) -> Iterator[None]:
    torch.compiler.set_stance("force_eager")  # compiling would take half of a rank's time
    with apply(cpu.patches()):
        case.initialize()
        if case.steps_by == "fused":
            optimizers.Adam = distrib_optimizer.Adam = FusedAdam
            optimizers.USING_PYTORCH_OPTIMIZER = False
        yield


def whole(case: Case, partial: PartialState) -> PartialState:
    """Return the partial state summed over all ranks of a pipeline."""
    if case.ranks != "pipeline":
        return partial
    states: list[Any] = [None] * RANKS
    dist.all_gather_object(states, partial)
    return functools.reduce(PartialState.plus, states)


def events_of(case: Case) -> tuple[Event, ...]:
    events = EVENTS[case.dtype]
    if case.chained:
        events = (*events[:-1], Event(skip=1e-4), events[-1])
    if case.dtype != "fp16":
        return (*events, Event(spoilt_by=math.inf), Event(spoilt_by=math.nan))
    if case.ranks == "expert":  # experts have a loss scaler of their own
        return (*events, *[Event(spoils_experts=True)] * 3, QUIET)
    return events


def beside_a_twin(case: Case) -> None:
    with platform(case):
        stock, ours = Training(case), Training(case)
        speculative = SpeculativeOptimizer(ours.optimizer, [ours.model])
        scales: list[float] = []
        for seed, event in enumerate(events_of(case)):
            for training in (stock, ours):
                training.config.clip_grad = event.clip
                training.config.grad_norm_skip_threshold = event.skip
            assert str(stock.passes(seed, event)) == str(ours.passes(seed, event))
            expected = stock.optimizer.step()
            before = ours.everything()

            state = whole(case, speculative.prepare())
            assert speculative.is_quiet(state) == event.quiet, (state, event)
            if event.steps:
                speculative.step(keep=not event.quiet or bool(seed % 2))
            ours.schedule(True)
            if event.quiet:
                assert math.sqrt(state.squared_norm) == pytest.approx(expected[1], rel=1e-6)
                result = expected
            else:
                ours.begin_next_step(seed)
                speculative.take_back()
                assert not (names := differing(ours.everything(), before)), names[:5]
                ours.begin_next_step(seed + 1)
                result = speculative.redo(state.found_inf)
                ours.schedule(result[0])
            stock.schedule(expected[0])
            # Results are compared as text, because NaNs differ from themselves.
            assert str(result) == str(expected), event
            names = differing(ours.everything(), stock.everything())
            assert not names, (event, names[:5])
            assert bool(expected[0]) <= bool(differing(ours.everything(), before))
            scales.append(float(ours.optimizer.get_loss_scale()))
            stock.zero()
            ours.zero()
        moves = {math.copysign(1, new - old) for old, new in pairwise(scales) if new != old}
        assert moves == ({1, -1} if case.dtype == "fp16" else set()), scales


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_in_pieces_is_stocks(case: Case) -> None:
    """A speculative step in pieces equals stock's step: a good one, one that is clipped or skipped,
    and one with infinities or NaNs. A step that is not good is rolled back and repeated, or not
    taken before the verdict."""
    values(run_ranks(RANKS, lambda rank: beside_a_twin(case)))


def test_a_norm_that_stays_on_the_device_is_clipped_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A speculative step clips by a norm that stays on the device as stock does. With Transformer
    Engine the norm and the coefficient are tensors, and every gradient is scaled."""

    def scale(chunk: int, overflow: torch.Tensor, lists: Any, coefficient: torch.Tensor) -> None:
        for source, to in zip(*lists, strict=True):
            to.copy_(source * coefficient)

    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", scale)
    case = Case("bf16", "pipeline")
    values(run_ranks(RANKS, lambda rank: beside_a_twin(case)))


def near_thresholds(rank: int) -> None:
    with platform(Case("fp32", "data")):
        training = Training(Case("fp32", "data"))
        speculative = SpeculativeOptimizer(training.optimizer, [training.model])

        def quiet(norm: float, found_inf: bool = False) -> bool:
            return speculative.is_quiet(PartialState(norm**2, found_inf))

        for name in ("clip_grad", "grad_norm_skip_threshold"):
            training.config.clip_grad = 0.0
            assert quiet(1e9) and not quiet(1.0, found_inf=True)
            assert not quiet(math.inf) and not quiet(math.nan)
            setattr(training.config, name, 2.0)
            assert quiet(2 * (1 - 2e-5)) and not quiet(2 * (1 - 0.5e-5)) and not quiet(2.1)


def test_near_a_threshold_stocks_own_sums_decide() -> None:
    values(run_ranks(RANKS, near_thresholds))


class Recorded:
    """Stand-in for `PostValidation` that records its calls and never commits by itself."""

    def __init__(self) -> None:
        self.is_pending = False
        self.actions: list[Callable[[], None]] = []
        self.steps = 0

    def defer(self, action: Callable[[], None]) -> None:
        self.actions.append(action)

    def optimizer_step(self, stock: Callable[[Any], Any], optimizer: Any) -> Any:
        self.steps += 1
        return stock(optimizer)


def patched(case: Case) -> None:
    recorded = Recorded()
    with platform(case), apply(optimizer_patches(recorded)):  # type: ignore[arg-type]
        training = Training(case)
        speculative = SpeculativeOptimizer(training.optimizer, [training.model])
        groups = training.model.bucket_groups
        gradients = [buffer.grad_data for buffer in training.model.buffers]
        for seed in range(2):
            training.passes(seed, QUIET)
            assert training.optimizer.step()[0] and recorded.steps == seed + 1
            training.zero()
            assert not recorded.actions
            assert not any(gradient.any() for gradient in gradients)

        training.passes(2, QUIET)
        speculative.prepare()
        speculative.step(keep=True)
        recorded.is_pending = True
        held = [gradient.clone() for gradient in gradients]
        training.zero()
        # One of the two deferred actions is the chained optimizer's zero_grad.
        assert len(recorded.actions) == 2
        training.begin_next_step(1)
        gathered = [group.param_gather_dispatched for group in groups]
        assert all(map(torch.equal, held, gradients)) and held[0].any()

        assert speculative.redo(found_inf=False)[0] and recorded.steps == 2
        # The previous step is committed in the middle of the next step.
        with training.model.no_sync():
            for group, was_gathered in zip(groups, gathered, strict=True):
                group.param_gather_dispatched = was_gathered
            for action in recorded.actions:
                action()
            assert not any(gradient.any() for gradient in gradients)
            assert all(p.grad is None for p in training.optimizer.get_parameters())
            assert not any(group.is_last_microbatch for group in groups)
            assert [group.param_gather_dispatched for group in groups] == gathered
        assert all(group.is_last_microbatch for group in groups)
        assert len(recorded.actions) == 2


@pytest.mark.parametrize(
    "case",
    [
        Case("fp32", "data", chained=False),
        Case("bf16", "expert"),
        Case("fp16", "data", distributed=True, overlap=True),
        Case("bf16", "data", distributed=True, chained=False),
    ],
    ids=str,
)
def test_steps_are_handed_over_and_zeroing_waits(case: Case) -> None:
    values(run_ranks(RANKS, lambda rank: patched(case)))


def refused(rank: int) -> list[str]:
    with platform(Case("bf16", "data", distributed=True)):
        training = Training(Case("bf16", "data", distributed=True))
        (part,) = training.parts
        assert why_not(training.optimizer) is None is why_not(part)
        reasons = [why_not(SimpleNamespace())]
        training.model.ddp_config.num_distributed_optimizer_instances = 2
        reasons.append(why_not(training.optimizer))
        training.model.ddp_config.num_distributed_optimizer_instances = 1
        part.optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))])
        reasons.append(why_not(training.optimizer))
        with pytest.raises(ValueError, match="LBFGS"):
            SpeculativeOptimizer(training.optimizer, [training.model])
        return [str(reason) for reason in reasons]


def test_what_cannot_be_taken_back_is_refused() -> None:
    (reasons, _) = values(run_ranks(RANKS, refused))
    assert [reason.split(":")[0] for reason in reasons] == [
        "a step of SimpleNamespace cannot be taken back",
        "a step with num_distributed_optimizer_instances=2 cannot be taken back",
        "a step of LBFGS cannot be taken back",
    ]


def test_refused_settings_are_megatrons() -> None:
    """The settings that post-validation refuses are arguments of this Megatron. A refusal with a
    misspelt name would never apply, and the setting would be accepted."""
    arguments = importlib.import_module("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    derived = {"use_layer_wise_distributed_optimizer", "gtp_weight_remat_size"}
    known = {action.dest for action in parser._actions} | derived
    assert {refusal.setting for refusal in OPTIMIZER_REFUSALS} <= known
