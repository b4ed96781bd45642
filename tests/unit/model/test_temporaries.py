"""Tests of the estimated temporary tensors of passes, compared with PyTorch's allocations on the
CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.cost_model.activations import held_of_stage
from megatron_ext.cost_model.context import CONTEXT, WORKSPACES, context_bytes
from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.temporaries import temporary_bytes

MODEL = Model(
    layers=("-",),
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=16,
    ffn_hidden_size=256,
    vocabulary=4096,
    gated_linear_unit=True,
    normalization="RMSNorm",
)
RUN = Execution(512, hidden_dropout=0.0, attention_dropout=0.0, sequence_parallel=False)
PYTORCH = replace(RUN, framework=Framework.PYTORCH)


class LiveBytes(TorchDispatchMode):
    """Bytes of living tensors that operations have created, and the largest number of such
    bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self.most = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._sizes.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    @property
    def now(self) -> int:
        self._sizes = {key: size for key, size in self._sizes.items() if not key.expired()}
        return sum(self._sizes.values())


def test_loss_of_plain_pytorch() -> None:
    """The loss in plain PyTorch needs two fp32 gradients of the logits in its backward pass, as
    estimated. The estimate used to be 6 bytes a logit."""
    logits = torch.randn(512, 4096, dtype=torch.bfloat16, requires_grad=True)
    with LiveBytes() as live:
        loss = F.cross_entropy(logits.float(), torch.zeros(512, dtype=torch.long))
        stored = live.now
        live.most = 0
        loss.backward()
    assert stored == pytest.approx(4 * logits.numel(), rel=0.01)
    estimated = temporary_bytes(MODEL, Stage((), output_layer=True), PYTORCH)
    assert live.most - stored == pytest.approx(estimated, rel=0.02)


def test_mlp_of_plain_pytorch() -> None:
    """An MLP in plain PyTorch needs the estimated temporary bytes, and in a split backward pass
    also stores the second matrix's input until its weight gradient."""
    hidden, ffn = MODEL.hidden_size, MODEL.ffn_hidden_size
    one, two, three = (
        torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    )
    entering = torch.randn(512, hidden, dtype=torch.bfloat16, requires_grad=True)
    for weight in (one, two, three, entering):
        weight.grad = torch.zeros_like(weight)
    leaving = torch.ones_like(entering)
    with LiveBytes() as live:
        kept = F.silu(F.linear(entering, one)) * F.linear(entering, two)
        made = F.linear(kept, three)
        stored = live.now
        made.backward(leaving)
    estimated = temporary_bytes(MODEL, Stage(("-",)), PYTORCH)
    assert live.most - stored + leaving.nbytes == pytest.approx(estimated, rel=0.05)


def test_what_is_recomputed_is_there_at_once() -> None:
    """While layers are recomputed, their activations count as temporary bytes. Only the inputs of
    recomputed layers used to be counted."""
    model, stage = replace(MODEL, layers=("*-",) * 4), Stage(("*-",) * 4)
    whole = held_of_stage(model, Stage(("*-",)), RUN)[0]
    plain = temporary_bytes(model, stage, RUN)
    full = replace(RUN, recompute=True)
    stored = held_of_stage(model, Stage(("*-",)), full)[0]
    assert temporary_bytes(model, stage, full) == plain + whole - stored
    together = replace(full, recompute_num_layers=3)
    assert temporary_bytes(model, stage, together) == plain + 3 * whole - stored
    block = replace(together, recompute_method="block")
    assert temporary_bytes(model, stage, block) == plain + whole - stored
    of_mlp = replace(RUN, recompute_modules=frozenset(["mlp"]))
    left = held_of_stage(model, Stage(("*-",)), of_mlp)[0]
    assert temporary_bytes(model, stage, of_mlp) == plain + whole - left > plain


def test_experts_have_gradients_of_what_was_exchanged() -> None:
    experts = replace(
        MODEL, layers=("*E",), num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128
    )
    inside = 512 * 2 * (3 * 128 + 2 * 64) * 2
    around = 2 * 512 * 64 * 2
    assert temporary_bytes(experts, Stage(("*E",)), RUN) == inside + around
    split = replace(RUN, tensor_parallel=2, sequence_parallel=True)
    gathered = (512 * 64 + 512 * 64 + 256 * 64) * 2
    assert temporary_bytes(experts, Stage(("*E",)), split) == inside / 2 + gathered


def test_bytes_outside_tensors() -> None:
    """The estimate of memory outside tensors has NCCL's buffers for a ring in each group of several
    ranks, and for the experts' exchange with up to seven peers."""
    ring, alone = 24 * 12 * 2**20, CONTEXT + WORKSPACES

    def of(pipeline: int, data: int, experts: int = 1, **sizes: int) -> float:
        run = replace(RUN, **sizes)  # type: ignore[arg-type]
        return context_bytes(
            run, pipeline=pipeline, data_parallel=data, expert_data_parallel=experts
        )

    assert of(1, 1) == alone and of(4, 1) == alone + ring
    assert of(4, 8, 8, tensor_parallel=2) == alone + 3 * ring
    exchange = 7 * 32 * 12 * 2**20
    assert exchange == pytest.approx(3.3e9 / 1.17, rel=0.01)
    assert of(4, 8, 2, expert_parallel=64) == alone + 3 * ring + exchange
    assert of(4, 8, 1, expert_parallel=4) == alone + 2 * ring + exchange * 3 / 7
