"""Training script of tests: scripts/pretrain_gpt.py with gradients scaled up, infinite or NaN in
some iterations.

The variable BAD_GRADIENTS is JSON: by iteration, counted from 1, the factor of its losses before
they are differentiated. The logged losses are without the factor.
"""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import torch
from megatron.training.global_vars import get_args

FACTORS = {int(k): float(v) for k, v in json.loads(os.environ["BAD_GRADIENTS"]).items()}

script = runpy.run_path(
    str(Path(__file__).parents[3] / "scripts" / "pretrain_gpt.py"), run_name="script"
)
names = script["main"].__globals__
loss_func = names["loss_func"]


def scaled_loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor
) -> tuple[torch.Tensor, Any, Any]:
    loss, tokens, report = loss_func(loss_mask, output_tensor)
    factor = FACTORS.get(get_args().curr_iteration + 1) if torch.is_grad_enabled() else None
    return loss if factor is None else loss * factor, tokens, report


names["loss_func"] = scaled_loss_func
if __name__ == "__main__":
    script["main"]()
