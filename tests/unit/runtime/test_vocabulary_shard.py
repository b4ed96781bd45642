"""Tests of the mathematics of a vocabulary that is split over shards, in one process, against
torch's own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor
from torch.nn import functional

from megatron_ext.features.vocabulary.runtime.shard import (
    VocabularyShard,
    add_embedding_gradient,
    add_output_gradient,
    combine,
    hidden_states_gradient,
    look_up,
    losses_of,
    make_logits,
    scaled,
)
from tests.helpers.vocabulary import Rows

ROWS, HIDDEN, SEQUENCE, BATCH = 96, 16, 12, 2
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ULP = 2.0**-23


def gradient_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@dataclass
class Case:
    """Tables, hidden states and labels; ``spread`` widens the range of the logits."""

    dtype: torch.dtype
    shards: int
    spread: float = 1.0

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.shards)
        table = torch.randn(ROWS, HIDDEN, generator=draw)
        self.table = table.to(self.dtype)
        hidden_states = self.spread * torch.randn(SEQUENCE, BATCH, HIDDEN, generator=draw)
        self.hidden_states = hidden_states.to(self.dtype)
        self.labels = torch.randint(ROWS, (BATCH, SEQUENCE), generator=draw)
        self.by_loss = torch.rand(BATCH, SEQUENCE, generator=draw)
        self.by_loss[0, ::3] = 0.0

    def parts(self) -> list[VocabularyShard]:
        rows = ROWS // self.shards
        return [
            VocabularyShard(part, part, at * rows, None, False)
            for at, part in enumerate(
                Rows(torch.nn.Parameter(part.clone())) for part in self.table.chunk(self.shards)
            )
        ]

    def divided(self, early: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses and the gradients of the hidden states and of the table, computed shard
        after shard."""
        shards = self.parts()
        with torch.no_grad():
            kept = [make_logits(shard, self.hidden_states, self.labels, early) for shard in shards]
            statistics = combine(torch.stack([logits.statistics for logits in kept]))
            total = torch.zeros(SEQUENCE, BATCH, HIDDEN)
            for shard, logits in zip(shards, kept, strict=True):
                total += hidden_states_gradient(shard, logits, statistics)
                add_output_gradient(shard, logits, statistics, self.by_loss)
            gradient = scaled(shards[0], total, self.by_loss, self.dtype)
        table = torch.cat([gradient_of(shard.output) for shard in shards])
        return losses_of(statistics, self.labels, ROWS), gradient, table

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses and gradients as autograd computes them. The logits are converted to
        fp32 after the matrix product, as in Megatron."""
        table = self.table.clone().requires_grad_()
        hidden_states = self.hidden_states.clone().requires_grad_()
        logits = (hidden_states @ table.t()).float()
        losses = functional.cross_entropy(
            logits.flatten(0, 1), self.labels.t().flatten(), reduction="none"
        )
        losses = losses.view(SEQUENCE, BATCH).t()
        (losses * self.by_loss).sum().backward()
        return losses.detach(), gradient_of(hidden_states), gradient_of(table)


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_are_torchs_to_a_few_ulps(dtype: torch.dtype, shards: int, spread: float) -> None:
    """Losses of a split vocabulary are torch's to a few ulps, in fp32 even if logits are not.

    A loss is a difference of logits, so its error is relative to their range: 4 units in the last
    place of that range.
    """
    case = Case(dtype, shards, spread)
    (losses, _, _), (expected, _, _) = case.divided(False), case.whole()
    assert losses.dtype is torch.float32
    logits = (case.hidden_states @ case.table.t()).float()
    size = (logits.amax(-1) - logits.amin(-1)).t().clamp(min=1.0)
    assert ((losses - expected).abs() <= 4 * ULP * size).all()


@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("early", [False, True], ids=["1", "2"])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dtype: torch.dtype, shards: int, early: bool, spread: float) -> None:
    """Gradients of a split vocabulary are near those of autograd in float64.

    If autograd in the same type is wrong by more than two units in the last place, ours may be
    wrong by twice as much. Cases with a wide spread have tokens of high probability, whose gradient
    is a small difference of large numbers. The published formula of variant 2, P' W - G W, loses
    the digits of this difference.
    """
    case = Case(dtype, shards, spread)
    exact = Case(torch.float64, shards, spread)
    exact.table, exact.hidden_states = case.table.double(), case.hidden_states.double()
    divided, whole = case.divided(early), case.whole()
    table = exact.table.requires_grad_()
    hidden_states = exact.hidden_states.requires_grad_()
    logits = hidden_states @ table.t()
    rounded = (case.hidden_states @ case.table.t()).double()
    # `divided` and `whole` use the rounded product, too.
    logits = logits + (rounded - logits).detach()
    losses = functional.cross_entropy(
        logits.flatten(0, 1), case.labels.t().flatten(), reduction="none"
    )
    (losses.view(SEQUENCE, BATCH).t() * case.by_loss).sum().backward()
    for got, stock, expected in zip(
        divided[1:], whole[1:], (hidden_states.grad, table.grad), strict=True
    ):
        assert got.dtype is dtype and expected is not None
        size = expected.norm()
        stocks = float((stock.double() - expected).norm() / size)
        ours = float((got.double() - expected).norm() / size)
        assert ours <= 2 * max(stocks, torch.finfo(dtype).eps), (ours, stocks)


def test_a_label_outside_the_vocabulary() -> None:
    """A label outside the vocabulary is treated as by Megatron: it has the loss of the likeliest
    token, and no token gets a gradient for it."""
    case = Case(torch.float32, 3)
    case.labels[0, 0], case.labels[1, 1] = -100, ROWS
    losses, _, _ = case.divided(False)
    logits = case.hidden_states @ case.table.t()
    expected = (logits.logsumexp(-1) - logits.amax(-1)).t()
    for place in ((0, 0), (1, 1)):
        assert abs(losses[place] - expected[place]) <= 4 * ULP * expected.max()
    for early in (False, True):
        _, gradient, table = case.divided(early)
        softmax = logits.softmax(-1)
        product = (softmax @ case.table)[1, 1] * case.by_loss[1, 1]
        torch.testing.assert_close(gradient[1, 1], product)
        assert torch.isfinite(table).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype) -> None:
    """The split embedding returns the same rows, bit for bit. The gradient of a token that occurs
    often is summed in fp32."""
    case = Case(dtype, 4)
    shards = case.parts()
    tokens = case.labels.clone()
    tokens[:, ::2] = 5
    with torch.no_grad():
        embedded = torch.stack([look_up(shard, tokens) for shard in shards]).sum(0)
    assert torch.equal(embedded, case.table[tokens])
    gradient = case.hidden_states.transpose(0, 1).contiguous()
    with torch.no_grad():
        for shard in shards:
            add_embedding_gradient(shard, tokens, gradient)
    expected = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
    expected.index_add_(0, tokens.flatten(), gradient.double().flatten(0, 1))
    got = torch.cat([gradient_of(shard.embedding) for shard in shards])
    size = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
    size.index_add_(0, tokens.flatten(), gradient.double().abs().flatten(0, 1))
    rounding = torch.finfo(dtype).eps * expected.abs() + 24 * ULP * size
    assert ((got.double() - expected).abs() <= rounding).all()


def test_main_grad() -> None:
    """If a data-parallel wrapper has added a ``main_grad``, every gradient is added to it in
    fp32."""
    case = Case(torch.bfloat16, 2)
    case.labels[:, ::2] = 5
    step = 2.0**-20 * (1 + 2.0**-7)  # its multiples have more digits than bfloat16
    for shard in case.parts():
        main_grad = torch.zeros(shard.rows, HIDDEN)
        vars(shard.embedding)["main_grad"] = main_grad
        with torch.no_grad():
            logits = make_logits(shard, case.hidden_states, case.labels, False)
            statistics = combine(logits.statistics.unsqueeze(0))
            add_output_gradient(shard, logits, statistics, case.by_loss)
            before = main_grad.clone()
            gradient = torch.full((BATCH, SEQUENCE, HIDDEN), step, dtype=torch.bfloat16)
            add_embedding_gradient(shard, case.labels, gradient)
        assert shard.embedding.grad is None and before.abs().sum() > 0
        is_here, rows = shard.rows_of(case.labels)
        counts = torch.bincount(rows[is_here], minlength=shard.rows)
        assert torch.equal(main_grad, before + counts.unsqueeze(-1) * step)
