"""Tests of the passes of one stage as calls of Megatron's model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import MegatronModule

from megatron_ext.adapter.step.model_stage import ModelStage, StepCall
from megatron_ext.adapter.step.parameter_gathers import ParameterGathers
from megatron_ext.runtime.recorder import Recorder


class QuantisedModel(MegatronModule):
    """Model that quantizes its weights to FP8 in forward passes with is_first_microbatch, as
    Transformer Engine does."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(fp8="hybrid"))
        self.is_first_microbatch = False
        self.quantised: list[bool] = []  # for each forward pass, whether it quantized the weights

    def set_input_tensor(self, tensors: Any) -> None:
        pass

    def forward(self) -> torch.Tensor:
        self.quantised.append(self.is_first_microbatch)
        self.is_first_microbatch = False
        return torch.ones(1, requires_grad=True)


def stage_of(
    model: QuantisedModel, forward_only: bool = False, first_val_step: bool | None = None
) -> ModelStage:
    """Return the stage of a new step."""
    config = SimpleNamespace(
        timers=None,
        enable_autocast=False,
        autocast_dtype=None,
        calculate_per_token_loss=False,
        num_moe_experts=None,
        mtp_num_layers=None,
        deallocate_pipeline_outputs=False,
    )

    def forward_step_func(iterator: Any, chunk: QuantisedModel) -> tuple[torch.Tensor, None]:
        return chunk(), None

    call = StepCall(forward_step_func, 3, forward_only, False, first_val_step, False, 1)
    gathers = ParameterGathers({})
    return ModelStage(1, model, config, None, call, Recorder(0), gathers, has_loss=False)


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(schedules, "set_current_microbatch", lambda model, microbatch: None)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_weights_are_quantised_in_a_steps_first_forward_pass(order: Sequence[int]) -> None:
    """Weights are quantized to FP8 in the first forward pass of a step, whichever microbatch it
    runs. They used to be quantized in the pass of microbatch 0, so with a schedule file that runs
    others first, earlier passes used the weights of the step before."""
    model = QuantisedModel()
    for _ in range(2):
        stage = stage_of(model)
        for microbatch in order:
            stage.forward(microbatch, torch.ones(1))
    assert model.quantised == [True, False, False] * 2


def test_a_restarted_step_quantizes_again() -> None:
    """A step that restarts quantizes its weights again, because the optimizer step before it was
    repeated and the weights have changed."""
    model = QuantisedModel()
    stage = stage_of(model)
    stage.forward(0, torch.ones(1))
    stage.forget()
    stage.forward(0, torch.ones(1))
    assert model.quantised == [True, True]


def test_an_evaluation_quantises_once() -> None:
    """An evaluation quantizes weights only in its first step, which Megatron names
    (first_val_step), because weights do not change between its steps."""
    model = QuantisedModel()
    for is_first in (True, False):
        stage = stage_of(model, forward_only=True, first_val_step=is_first)
        for microbatch in (1, 0):
            stage.forward(microbatch, torch.ones(1))
    assert model.quantised == [True, False, False, False]
