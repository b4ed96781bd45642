"""Tests of a recomputed forward pass of a stage, which stores only its input and whose loss counts
once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from megatron_ext.adapter.step.checkpointed_forward import checkpointed_forward
from megatron_ext.adapter.step.model_stage import ModelStage, StepCall
from megatron_ext.adapter.step.parameter_gathers import ParameterGathers
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, apply
from megatron_ext.patches.megatron.core.transformer.moe import moe_utils as experts
from megatron_ext.patches.megatron.core.transformer.multi_token_prediction import (
    logging as multi_token_prediction,
)
from megatron_ext.runtime.recorder import Recorder

MICROBATCHES = 3


class Model(MegatronModule):
    """Model of the last stage, with dropout and one weight."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(fp8=None, fp4=None))
        self.weight = torch.nn.Parameter(torch.full((4, 4), 0.5))
        self.x = torch.empty(0)
        # For each forward run: whether it is the first of its microbatch, and whether it computes
        # gradients.
        self.runs: list[tuple[bool, bool]] = []

    def set_input_tensor(self, tensors: list[Tensor]) -> None:
        (self.x,) = tensors

    def forward(self, tokens: Tensor, *, scale: float) -> Tensor:
        self.runs.append((checkpointed_forward.is_on, torch.is_grad_enabled()))
        return torch.nn.functional.dropout((self.x + tokens) @ self.weight, 0.5) * scale


class Job:
    """Step of one stage, with the losses that its caller sees."""

    def __init__(self, recomputed: set[int], step: Callable[..., Any] | None = None) -> None:
        self.losses: list[float] = []  # losses, one for each call of the loss function
        self.model = Model()
        self.iterator = iter([torch.full((4,), float(number)) for number in range(MICROBATCHES)])
        config = SimpleNamespace(
            timers=None,
            enable_autocast=False,
            autocast_dtype=None,
            calculate_per_token_loss=False,
            num_moe_experts=None,
            mtp_num_layers=None,
            deallocate_pipeline_outputs=True,
            grad_scale_func=None,
        )
        call = StepCall(step or self.step, MICROBATCHES, False, False, None, False, 1)
        self.stage = ModelStage(
            1,
            self.model,
            config,
            self.iterator,
            call,
            Recorder(0),
            ParameterGathers({}),
            (),
            recomputed,
            has_loss=True,
        )

    def step(self, iterator: Iterator[Tensor], model: Model) -> tuple[Tensor, Any]:
        return model(next(iterator), scale=2.0), self.loss

    def loss(self, output: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        loss = output.mean()
        self.losses.append(loss.item())
        return loss, torch.tensor(4, dtype=torch.int), {"loss": loss.item()}

    def weight_gradient(self) -> Tensor:
        gradient = self.model.weight.grad
        assert gradient is not None
        return gradient

    def run(self) -> list[Tensor]:
        """Run all forward passes, then the rest of each microbatch, and return the gradients of the
        inputs."""
        torch.manual_seed(1)
        inputs = [torch.ones(4, requires_grad=True) for _ in range(MICROBATCHES)]
        for microbatch, x in enumerate(inputs):
            self.stage.forward(microbatch, x)
        gradients = []
        for microbatch in range(MICROBATCHES):
            if microbatch in self.stage._recomputed:
                self.stage.recompute(microbatch)
            gradient = self.stage.backward(microbatch, None)
            assert gradient is not None
            gradients.append(gradient)
        return gradients


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(schedules, "set_current_microbatch", lambda model, microbatch: None)
    monkeypatch.setattr(random, "_get_cuda_rng_state", lambda **asked: torch.empty(0))
    monkeypatch.setattr(random, "_set_cuda_rng_state", lambda state, **asked: None)
    random.initialize_rng_tracker()


def test_it_runs_again_as_it_was() -> None:
    """A recomputed forward pass repeats the first one with the same dropout on the same tokens.
    Random numbers drawn later are those of a training without recompute."""
    plain, again = Job(set()), Job({0, 2})
    expected, after = plain.run(), torch.get_rng_state()
    gradients = again.run()
    assert torch.equal(torch.get_rng_state(), after)
    assert all(map(torch.equal, gradients, expected))
    assert torch.equal(again.weight_gradient(), plain.weight_gradient())
    assert again.model.runs == [(True, False), (False, True), (True, False), *[(False, True)] * 2]


def test_its_loss_is_computed_once_and_reported_in_order() -> None:
    plain, again = Job(set()), Job({0, 2})
    plain.run()
    again.run()
    assert again.stage.losses == plain.stage.losses
    assert sorted(again.losses) == sorted(plain.losses) and len(again.losses) == MICROBATCHES
    assert again.stage.tokens == plain.stage.tokens
    assert next(again.iterator, None) is None, "a batch was left over"


def test_nothing_but_its_input_is_kept() -> None:
    job = Job({0})
    x = torch.ones(4, requires_grad=True)
    output = job.stage.forward(0, x)
    assert not output.requires_grad and not job.stage._between
    assert job.stage._checkpointed[0][0] is x
    job.stage.forget()
    assert not job.stage._checkpointed


def twice(iterator: Iterator[Tensor], model: Model) -> tuple[Tensor, Any]:
    model(next(iterator), scale=1.0)
    return model(next(iterator), scale=1.0), None


def changed(iterator: Iterator[Tensor], model: Model) -> tuple[Tensor, Any]:
    return model(next(iterator), scale=1.0) * 2, None


def within(iterator: Iterator[Tensor], model: Model) -> tuple[Tensor, Any]:
    return model.forward(next(iterator), scale=1.0), None


def with_gradient(iterator: Iterator[Tensor], model: Model) -> tuple[Tensor, Any]:
    return model(next(iterator) * model.weight[0], scale=1.0), None


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (twice, "called the model 2 times"),
        (changed, "returns its output unchanged"),
        (within, "called the model 0 times"),
        (with_gradient, "no tensor that requires a gradient"),
    ],
)
def test_what_cannot_run_again_is_refused(step: Callable[..., Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Job({0}, step).stage.forward(0, torch.ones(4, requires_grad=True))
    assert not checkpointed_forward.is_on and torch.is_grad_enabled()


def test_a_loss_of_the_first_run_is_refused() -> None:
    """A forward_step_func that computes its loss by itself, from the output that it got, is refused
    under recompute. The first run's output has no gradient, so such a loss would train nothing; it
    used to fail an assertion."""

    def computed(iterator: Iterator[Tensor], model: Model) -> tuple[Tensor, Any]:
        output = model(next(iterator), scale=1.0)
        loss = output.mean()
        return output, lambda unused: (loss, {"loss": loss.item()})

    with pytest.raises(ValueError, match="does not depend on the output it was given"):
        Job({0, 1, 2}, computed).run()


def test_it_runs_again_under_the_callers_autocast() -> None:
    """A recomputed pass computes in the type of the first one. A forward_step_func may call the
    model within torch's autocast, which the recomputed pass used not to enter."""
    types: list[torch.dtype] = []

    class Noting(Model):
        def forward(self, tokens: Tensor, *, scale: float) -> Tensor:
            types.append((self.x @ self.weight).dtype)
            return super().forward(tokens, scale=scale)

    def within(iterator: Iterator[Tensor], model: Model) -> tuple[Tensor, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            return model(next(iterator), scale=1.0), job.loss

    job = Job({0, 2}, within)
    job.model.__class__ = Noting
    job.run()
    assert types == [torch.bfloat16] * 5


@pytest.fixture
def patched() -> Iterator[None]:
    config = PipelineConfig()
    patches: list[Patch] = [*multi_token_prediction.patches(config), *experts.patches(config)]
    with apply(patches):
        yield


@pytest.mark.usefixtures("patched")
def test_multi_token_prediction_is_logged_in_the_second_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    save = getattr(MTPLossLoggingHelper, multi_token_prediction.name_here())
    figures = [torch.tensor(1.0)] * (1 if "loss" in save.__name__ else 3)
    for is_on, expected in ((True, {}), (False, {1.0})):
        monkeypatch.setattr(checkpointed_forward, "is_on", is_on)
        save(*figures, 0, 1)
        tracked = MTPLossLoggingHelper.tracker
        assert {v.item() for k, v in tracked.items() if k.endswith("values")} == set(expected)


@pytest.mark.usefixtures("patched")
def test_both_runs_choose_the_same_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recomputed pass chooses experts in the same order as the first one. In the first pass,
    which runs without gradients, Megatron leaves the chosen experts unsorted, so sums of scores
    used to differ in the last bit."""
    asked = []
    topk = torch.topk

    def noting(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["sorted"])
        return topk(*args, **kwargs)

    monkeypatch.setattr(torch, "topk", noting)
    logits = torch.rand(5, 8)
    for is_on in (True, False):
        monkeypatch.setattr(checkpointed_forward, "is_on", is_on)
        with torch.set_grad_enabled(not is_on):
            probabilities, _ = moe_utils.topk_routing_with_score_function(logits, 3)
        assert not probabilities.requires_grad
    assert asked == [True, True]
