"""Auxiliary losses of routers over whole microbatches, whose tokens come slice by slice.

The loss that balances experts is a scale times the sum over experts of P T / N^2, with P the sum of
an expert's scores, T the number of its tokens, and N the number of all tokens. Its gradient by a
token's scores contains the T of the whole microbatch. T is complete when a slice's backward pass
runs, after the forward passes of all slices. The loss itself is computed and logged with the last
slice; earlier slices give 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from torch import Tensor

from megatron_ext.runtime.slices.running_slice import Span, running_slice


class _Router:
    """State of the running router: the router, its loss, and whether tokens are only counted."""

    def __init__(self) -> None:
        self.now: tuple[Any, str] = (None, "")
        self.counts = False

    @contextlib.contextmanager
    def making(self, router: Any, name: str) -> Iterator[None]:
        before, self.now = self.now, (router, name)
        try:
            yield
        finally:
            self.now = before

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        self.counts = True
        try:
            yield
        finally:
            self.counts = False


_router = _Router()


class _Balance:
    """Tokens and scores of each expert, by slice, for one router's loss in one microbatch."""

    def __init__(self) -> None:
        self.tokens: dict[Span, Tensor] = {}
        self.scores: dict[Span, Tensor] = {}

    @property
    def is_complete(self) -> bool:
        counted = sum(span.end - span.begin for span in self.tokens)
        return counted == next(iter(self.tokens)).length


def _sum(by_slice: Mapping[Span, Tensor]) -> Tensor:
    """Return the sum of ``by_slice``, added in the order of the sequence, not of computation."""
    order = sorted(by_slice, key=lambda span: span.begin)
    return torch.stack([by_slice[span] for span in order]).sum(0)


class _BalancingLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, balance: _Balance, scale: float, is_last: bool) -> Tensor:
        ctx.balance, ctx.scale, ctx.shape = balance, scale, scores.shape
        if not is_last:
            return scores.new_zeros(())
        assert balance.is_complete, "the last slice's forward pass before another's"
        return (_sum(balance.tokens) * _sum(balance.scores)).sum() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        assert ctx.balance.is_complete, "a backward pass before the last slice's forward pass"
        by_expert = _sum(ctx.balance.tokens) * (gradient * ctx.scale)
        return by_expert.expand(ctx.shape), None, None, None


def count_first(
    original: Callable[..., Any], router: Any, logits: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a router; in a first forward pass whose slice is recomputed, count its tokens and scores.

    Recomputed layers compute their losses in a second forward pass, within a slice's backward pass,
    when earlier slices of the sequence are not yet recomputed. The tokens and scores of the whole
    microbatch are therefore counted in the first forward pass, which runs without gradients.
    """
    made = original(router, logits, *args, **kwargs)
    is_first = running_slice.span is not None and router.training and not torch.is_grad_enabled()
    if is_first and router.is_aux_loss_enabled():
        chosen, scores = compute_routing_scores_for_aux_loss(
            logits.view(-1, logits.shape[-1]),
            router.topk,
            router.score_function,
            fused=router.config.moe_router_fusion,
        )
        with _router.counting():
            router._apply_aux_loss(scores, scores, chosen)
            router._apply_seq_aux_loss(scores, scores, chosen, *logits.shape[:2])
    return made


def making(name: str) -> Callable[..., Any]:
    """Return a wrapper of the router's method that computes its auxiliary loss ``name``.

    The wrapper notes which router's loss is being computed.
    """

    def make(original: Callable[..., Any], router: Any, *args: Any, **kwargs: Any) -> Any:
        with _router.making(router, name):
            return original(router, *args, **kwargs)

    return make


def balance(
    original: Callable[..., Tensor],
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    **more: Any,
) -> Tensor:
    """Return a router's balancing loss, computed over a whole microbatch that runs slice by slice.

    Wraps Megatron's switch_load_balancing_loss_func, which runs unchanged if no slice is running.
    """
    span = running_slice.span
    if span is None:
        return original(
            probs=probs,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=total_num_tokens,
            topk=topk,
            num_experts=num_experts,
            moe_aux_loss_coeff=moe_aux_loss_coeff,
            **more,
        )
    of_microbatch = running_slice.kept_of_use(_router.now, _Balance)
    of_microbatch.tokens[span] = tokens_per_expert
    of_microbatch.scores[span] = probs.detach().sum(0)
    tokens = _tokens_of_sequence(total_num_tokens, span)
    scale = num_experts * moe_aux_loss_coeff / (topk * tokens * tokens)
    is_last = span.end == span.length and not _router.counts
    return _BalancingLoss.apply(probs, of_microbatch, scale, is_last)


def attach(
    original: Callable[..., Tensor],
    router: Any,
    activation: Tensor,
    *args: Any,
    valid_token_count: int | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attach a router's loss, scaled by the tokens of the whole microbatch instead of one slice's.

    Wraps TopKRouter.attach_and_log_load_balancing_loss.
    """
    if _router.counts:
        return activation
    if (span := running_slice.span) is not None:
        count = activation.shape[0] if valid_token_count is None else valid_token_count
        valid_token_count = _tokens_of_sequence(count, span)
    return original(router, activation, *args, valid_token_count=valid_token_count, **kwargs)


def z_loss(
    original: Callable[..., Tensor], logits: Tensor, z_loss_coeff: float, **more: Any
) -> Tensor:
    """Return the running slice's share of a router's z-loss, which is a mean over tokens."""
    loss = original(logits, z_loss_coeff, **more)
    span = running_slice.span
    if span is None:
        return loss
    share = (span.end - span.begin) / span.length
    router, _ = _router.now
    # With a loss per token the gradient is scaled later by the number of the slice's tokens, so
    # only the loss's value is scaled here.
    if router.calculate_per_token_loss:
        return loss + (share - 1) * loss.detach()
    return share * loss


def _tokens_of_sequence(tokens: int, span: Span) -> int:
    """Return the number of tokens of the whole sequence, whose slice ``span`` has ``tokens``."""
    return tokens * span.length // (span.end - span.begin)
