"""The launcher's GPT with weights that do not depend on the ranks of its stages and experts."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.training import get_args

from scripts.pretrain_gpt import model_provider
from tests.helpers.callers import draw_by_name, named_parameters


def drawn_by_name(*args: Any, **kwargs: Any) -> Any:
    """Return a chunk whose matrices are drawn by their names in the whole model.

    V and loop placements would otherwise draw in another order than a linear one. Experts are
    numbered over all ranks, and the copies of a tied table have one name.
    """
    model = model_provider(*args, **kwargs)
    settings = get_args()
    of_a_rank = (settings.num_experts or 0) // settings.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * of_a_rank

    def renamed(name: str) -> str:
        if not settings.untie_embeddings_and_output_weights:
            name = name.replace("output_layer", "embedding.word_embeddings")
        return re.sub(r"(?<=local_experts\.)\d+", lambda number: str(int(number[0]) + first), name)

    matrices = named_parameters(model)
    draw_by_name((renamed(name), matrix) for name, matrix in matrices if matrix.dim() > 1)
    return model


def say_there_is_no_fp8() -> None:
    """Let Megatron find that FP8 is off: its recompute of single modules asks Transformer Engine.
    In a forked process only."""
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    for name in ("activation_recompute_forward", "fp8_autocast"):
        setattr(random, name, lambda **settings: contextlib.nullcontext())
