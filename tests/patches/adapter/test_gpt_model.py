"""Test of the patch of GPTModel that splits its vocabulary over the ranks, and of a model that it
refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.megatron.core.models.gpt.gpt_model.tables import patches


def test_logits_of_a_type_of_their_own_are_refused() -> None:
    """With a vocabulary split over the ranks, --logit-dtype (new in Megatron 0.20) is refused,
    because no rank has whole logits and the flag would change nothing."""

    def of_newer_megatron(model: Any, config: Any, logit_dtype: Any = None) -> None:
        raise AssertionError("built")

    (build,) = (
        patch.change
        for patch in patches(PipelineConfig.parse(schedule="1f1b", vocab_parallel="1"))
        if patch.target.endswith("GPTModel.__init__")
    )
    model = GPTModel.__new__(GPTModel)
    settings = SimpleNamespace(pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"logit_dtype=torch\.float32: .*; drop --logit-dtype"):
        build(of_newer_megatron, model, settings, logit_dtype=torch.float32)
