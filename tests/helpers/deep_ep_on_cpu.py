"""DeepEP and HybridEP on a machine without GPUs: the functions that Megatron's flex dispatcher
calls, on gloo.

Megatron's own code runs, including its autograd functions; only the package ``deep_ep`` is
replaced. As in the real package, all calls of a process share one buffer, through which every token
goes. Each call overwrites it, and returned tensors are copies. The handle of a call records where
its tokens went.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from torch import Tensor

handles: list[Handle] = []  # handles of all calls in this process
buffers: list[Any] = []  # all buffers that this process has created


def use_deep_ep() -> None:
    """Let Megatron, which was imported without DeepEP, find it; in a forked process only."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    vars(package).update(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer, utils=utils)
    vars(utils).update(EventHandle=SimpleNamespace, EventOverlap=_Event)
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
    for name in ("hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))


class _Event:
    """Event of an operation that has ended when the call returns."""

    def __init__(self, handle: object = None) -> None:
        pass

    def current_stream_wait(self) -> None:
        pass


@dataclass
class Handle:
    """Routes of the tokens of one call.

    Attributes:
        tokens: number of tokens of this rank.
        sent: for each rank, the numbers of the tokens that went to it.
        received: number of tokens that came from each rank.
        chosen: under HybridEP, for each received token and each local expert, whether the token
            goes to the expert; None under DeepEP.
        uses: the calls that used the handle, in order.
    """

    tokens: int
    sent: list[Tensor]
    received: list[int]
    chosen: Tensor | None = None
    uses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        handles.append(self)

    @property
    def rows(self) -> Tensor:
        """For each row that this rank sends, the number of its token."""
        return torch.cat(self.sent)

    @property
    def permutation(self) -> tuple[Tensor, Tensor]:
        """The expert and the received row of each row that a local expert computes, sorted by
        expert."""
        assert self.chosen is not None
        experts, come = self.chosen.T.nonzero(as_tuple=True)
        return experts, come


class _Exchange:
    """All-to-all through memory that all calls share."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._memory = torch.empty(0)
        buffers.append(self)

    def handle(self, is_chosen: Tensor) -> Handle:
        """Return the handle of tokens for which ``is_chosen`` [tokens, experts] says which experts
        get them."""
        per_rank = is_chosen.view(len(is_chosen), self.group.size(), -1).any(2)
        sent = [column.nonzero().flatten() for column in per_rank.unbind(1)]
        sizes = torch.tensor([len(tokens) for tokens in sent])
        received = torch.empty_like(sizes)
        dist.all_to_all_single(received, sizes, group=self.group)
        return Handle(len(is_chosen), sent, received.tolist())

    def out(self, x: Tensor, handle: Handle) -> Tensor:
        """Return the rows of all ranks' ``x``, one for each token, that were sent to this rank."""
        sizes = [len(tokens) for tokens in handle.sent]
        return self._exchange(x[handle.rows], sizes, handle.received)

    def back(self, x: Tensor, handle: Handle) -> Tensor:
        """Return, for each token of this rank, the sum of its rows in all ranks' ``x``, which has a
        row for each token that was sent to a rank."""
        sizes = [len(tokens) for tokens in handle.sent]
        returned = self._exchange(x, handle.received, sizes)
        return x.new_zeros(handle.tokens, x.shape[1]).index_add_(0, handle.rows, returned)

    def _exchange(self, rows: Tensor, out: Sequence[int], back: Sequence[int]) -> Tensor:
        width = rows.shape[1]
        leaving, coming = rows.numel(), sum(back) * width
        if self._memory.numel() < leaving + coming or self._memory.dtype != rows.dtype:
            self._memory = rows.new_empty(2 * (leaving + coming))
        source = self._memory[:leaving].view(-1, width).copy_(rows)
        target = self._memory[leaving : leaving + coming].view(-1, width)
        dist.all_to_all_single(target, source, list(back), list(out), group=self.group)
        result = target.clone()
        self._memory.fill_(torch.nan if rows.is_floating_point() else -1)
        return result


class Buffer(_Exchange):
    """The buffer of DeepEP."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        super().__init__(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(number: int) -> None:
        pass

    @staticmethod
    def get_dispatch_config(ranks: int) -> Any:
        return SimpleNamespace(
            get_nvl_buffer_size_hint=lambda hidden_bytes, ranks: hidden_bytes * ranks,
            get_rdma_buffer_size_hint=lambda hidden_bytes, ranks: 0,
        )

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **events: Any) -> Any:
        """Return what DeepEP passes on to `dispatch`. Only one of the values is used here: which
        experts get each token."""
        is_chosen = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        is_chosen.scatter_(1, topk_idx + 1, True)  # -1 means no expert
        return None, None, None, is_chosen[:, 1:], _Event()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        if handle is not None:
            handle.uses.append("dispatch of gradients")
            return self.out(x, handle), None, None, None, None, _Event()
        assert is_token_in_rank is not None and topk_idx is not None and topk_weights is not None
        experts = is_token_in_rank.shape[1] // self.group.size()
        handle = self.handle(is_token_in_rank)
        handle.uses.append("dispatch")
        chosen = self.out(topk_idx, handle) - self.group.rank() * experts
        is_here = (chosen >= 0) & (chosen < experts)
        chosen = chosen.where(is_here, -1)
        weights = self.out(topk_weights, handle).where(is_here, 0.0)
        counts = [int((chosen == expert).sum()) for expert in range(experts)]
        return self.out(x, handle), chosen, weights, counts, handle, _Event()

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor | None, _Event]:
        handle.uses.append("combine" if topk_weights is None else "combine of gradients")
        weights = None if topk_weights is None else self.back(topk_weights, handle)
        return self.back(x, handle), weights, _Event()


class HybridEPBuffer(_Exchange):
    """The buffer of HybridEP, which puts the tokens into the order of the experts."""

    def __init__(self, group: dist.ProcessGroup, num_local_experts: int, **sizes: Any) -> None:
        super().__init__(group)
        self._experts = num_local_experts

    def dispatch_with_permute(
        self,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: Handle | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, None, Tensor | None, Handle]:
        if handle is not None:
            handle.uses.append("dispatch of gradients")
            _, come = handle.permutation
            return self.out(hidden, handle)[come], None, None, None, handle
        assert routing_map is not None and probs is not None
        handle = self.handle(routing_map)
        handle.uses.append("dispatch")
        handle.chosen = self._of_this_rank(self.out(routing_map.long(), handle)).bool()
        experts, come = handle.permutation
        weights = self._of_this_rank(self.out(probs, handle))[come, experts]
        return self.out(hidden, handle)[come], weights, None, handle.chosen.sum(0), handle

    def combine_with_unpermute(
        self, hidden: Tensor, handle: Handle, probs: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        handle.uses.append("combine" if probs is None else "combine of gradients")
        experts, come = handle.permutation
        assert handle.chosen is not None
        rows = hidden.new_zeros(len(handle.chosen), hidden.shape[1]).index_add_(0, come, hidden)
        if probs is None:
            return self.back(rows, handle), None
        weights = probs.new_zeros(len(handle.chosen), self._experts * self.group.size())
        weights[come, experts + self.group.rank() * self._experts] = probs
        return self.back(rows, handle), self.back(weights, handle)

    def _of_this_rank(self, of_experts: Tensor) -> Tensor:
        first = self.group.rank() * self._experts
        return of_experts[:, first : first + self._experts]
