"""Training script of tests whose steps under a schedule end with wrong gradients.

It runs scripts/pretrain_gpt.py and imitates a patch of a Megatron function that now does something
else, so that a comparison with Megatron's gradients must fail.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.adapter.step import pipeline_training
from scripts import pretrain_gpt

_finalize_gradients = pipeline_training.finalize_gradients


def _with_too_much(call: Any, tokens: Any) -> None:
    _finalize_gradients(call, tokens)
    next(call.models[0].parameters()).main_grad.mul_(1.001)


if __name__ == "__main__":
    pipeline_training.finalize_gradients = _with_too_much
    pretrain_gpt.main()
