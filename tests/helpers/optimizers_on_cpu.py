"""Packages that some of Megatron's optimizers need, on the CPU; for forked processes only.

The packages are fetched, and Megatron, which was imported without them, finds them then. Torch
operations stand in for Transformer Engine's kernels; the other packages need no kernels here.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron.core import optimizer as optimizers
from megatron.core import parallel_state, utils
from megatron.core.optimizer import distrib_optimizer, emerging_optimizers
from torch import Tensor

from tests.helpers import transformer_engine_on_cpu
from tests.helpers.fetched import fetched


@dataclass(frozen=True)
class Package:
    """A package: ``fetch`` returns its folder or skips the test, and ``use`` lets Megatron find it
    there."""

    fetch: Callable[[], Path]
    use: Callable[[Path], None]


# --- Adam, of Transformer Engine


def _use_fused_adam(folder: Path) -> None:
    transformer_engine_on_cpu.load(folder)
    # torch must not report a GPU, or ranks would look for NCCL; Transformer Engine's stand-in makes
    # it report one.
    torch.cuda.is_available = lambda: False
    utils._te_version = None
    kernels: Any = sys.modules["transformer_engine_torch"]
    kernels.multi_tensor_adam = multi_tensor_adam
    kernels.multi_tensor_adam_param_remainder = multi_tensor_adam_param_remainder
    adam = importlib.import_module("transformer_engine.pytorch.optimizers").FusedAdam
    optimizers.Adam = distrib_optimizer.Adam = adam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


FUSED_ADAM = Package(
    partial(transformer_engine_on_cpu.fetch, transformer_engine_on_cpu.VERSIONS[-1]),
    _use_fused_adam,
)

Lists = list[list[Tensor]]


@torch.no_grad()
def multi_tensor_adam(chunk: int, skip: Tensor, lists: Lists, *settings: Any) -> None:
    """Run one step of Adam.

    ``lists`` are gradients, parameters, first and second moments and, optionally, parameters in
    high precision, from which the others are rounded.
    """
    mains = lists[4] if len(lists) == 5 else lists[1]
    for gradient, parameter, first, second, main in zip(*lists[:4], mains, strict=True):
        high = main.float()
        high -= _update(gradient.float(), high, first, second, *settings)
        main.copy_(high)
        parameter.copy_(high)


@torch.no_grad()
def multi_tensor_adam_param_remainder(
    chunk: int, skip: Tensor, lists: Lists, *settings: Any
) -> None:
    """Run one step of Adam for bf16 parameters. A tensor with the lower 16 bits of each fp32
    parameter stands in for the parameters in high precision."""
    for gradient, parameter, first, second, remainder in zip(*lists, strict=True):
        upper = parameter.view(torch.int16).int() - (remainder < 0).int()
        high = ((upper << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)
        high -= _update(gradient.float(), high, first, second, *settings)
        written = high.view(torch.int32)
        remainder.copy_(((written & 0xFFFF) ^ 0x8000) - 0x8000)
        parameter.view(torch.int16).copy_((written >> 16) + (remainder < 0).int())


def _update(
    gradient: Tensor,
    high: Tensor,
    first: Tensor,
    second: Tensor,
    rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    decoupled: int,
    corrected: int,
    decay: float,
) -> Tensor:
    assert decoupled and corrected
    first.copy_(first.float().lerp(gradient, 1 - beta1))
    second.copy_(second.float().lerp(gradient.square(), 1 - beta2))
    direction = first.float() / (1 - beta1**step)
    direction /= (second.float() / (1 - beta2**step)).sqrt() + epsilon
    return rate * (direction + decay * high)


# --- Muon, of NVIDIA's emerging optimizers

_MUON = "0.2.0"  # version of emerging-optimizers for Megatron 0.19
_REPOSITORY = "https://github.com/NVIDIA-NeMo/Emerging-Optimizers"


def _use_muon(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    # Muon imports these packages for logs, and for kernels that no test calls
    for name in ("absl", "triton"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
    importlib.reload(emerging_optimizers)
    importlib.reload(optimizers)


MUON = Package(
    partial(fetched, "emerging-optimizers", _MUON, f"git+{_REPOSITORY}@v{_MUON}"), _use_muon
)


# --- einops, with which Megatron groups the ranks of optimizer instances


def _use_einops(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    parallel_state.einops = importlib.import_module("einops")
    parallel_state.HAVE_EINOPS = True


EINOPS = Package(partial(fetched, "einops", "0.8.2"), _use_einops)
