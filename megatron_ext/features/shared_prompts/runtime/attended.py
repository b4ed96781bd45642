"""Keys and values that the segments of a row attend to: those of the prefix, then their own.

Kernels take them as one tensor for each segment, in which a prefix comes once for each answer.
Autograd would save these copies. The copies are gathered again in the backward pass instead: what
is saved does not depend on the length of prefixes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.features.shared_prompts.runtime.rows import SharedRow

_Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class AttendedTokens:
    """Tokens of a row that its segments attend to, concatenated by segment, as int64 tensors.

    Attributes:
        tokens: tokens of the row, [attended].
        of_segment: for each token of the row, its index among ``tokens`` for its own segment,
            [row].
        copies: an entry for the first answers of all prefixes, one for the second answers, and so
            on. An entry has the tokens of the prefixes, none of them twice, and their indices among
            ``tokens``.
    """

    tokens: Tensor
    of_segment: Tensor
    copies: tuple[tuple[Tensor, Tensor], ...]


def tokens_attended_to(row: SharedRow, device: torch.device) -> AttendedTokens:
    """Return the tokens that segments of ``row`` attend to, on ``device``, without waiting."""
    tokens: list[int] = []
    of_segment: list[int] = []
    copies: list[tuple[list[int], list[int]]] = []
    answers: dict[int, int] = {}  # number of the latest answer to each prompt
    for segment in row.segments:
        attended = row.attended(segment)
        before = len(attended) - segment.length
        if segment.parent is not None:
            number = answers[segment.parent] = answers.get(segment.parent, -1) + 1
            if number == len(copies):
                copies.append(([], []))
            copies[number][0].extend(attended[:before])
            copies[number][1].extend(range(len(tokens), len(tokens) + before))
        of_segment.extend(range(len(tokens) + before, len(tokens) + len(attended)))
        tokens.extend(attended)

    def made(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)

    pairs = tuple((made(of_row), made(copied)) for of_row, copied in copies)
    return AttendedTokens(made(tokens), made(of_segment), pairs)


def attend[Result](
    attended: AttendedTokens, kernel: Callable[..., Result], key: Tensor, value: Tensor
) -> Result:
    """Return the result of an attention ``kernel`` on the keys and values that segments attend to.

    Args:
        key: keys of the row, [row, ...]; ``value`` likewise.
        kernel: function of keys and values, [attended, ...].
    """
    gathered = _Gathered.apply(attended, key, value)
    with _regathering(attended, (key, value), gathered):
        return kernel(*gathered)


class _Gathered(torch.autograd.Function):
    """Autograd function that gathers rows of tensors by number.

    The gradients of a token's copies are summed in fp32 at least, one answer after the other, so
    that the order of summation is fixed.
    """

    @staticmethod
    def forward(ctx: Any, attended: AttendedTokens, *tensors: Tensor) -> _Tensors:
        ctx.attended = attended
        return tuple(tensor.index_select(0, attended.tokens) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(_summed(ctx.attended, gradient) for gradient in gradients))


def _summed(attended: AttendedTokens, gradient: Tensor) -> Tensor:
    exact = torch.promote_types(gradient.dtype, torch.float32)
    total = gradient.index_select(0, attended.of_segment).to(exact)
    for tokens, copied in attended.copies:
        total.index_add_(0, tokens, gradient.index_select(0, copied).to(exact))
    return total.to(gradient.dtype)


@dataclass(frozen=True)
class _View:
    """View of a gathered tensor: the tensor's number, and the view's place in its storage."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@contextlib.contextmanager
def _regathering(attended: AttendedTokens, tensors: _Tensors, gathered: _Tensors) -> Iterator[None]:
    """Context in which autograd gathers ``tensors`` when needed, and saves no gathered view."""
    sources = tuple(tensor.detach() for tensor in tensors)
    numbers = {t.untyped_storage().data_ptr(): number for number, t in enumerate(gathered)}

    def pack(tensor: Tensor) -> Tensor | _View:
        number = numbers.get(tensor.untyped_storage().data_ptr())
        if number is None:
            # A detached tensor is saved, since the output of an operation would keep that operation
            # alive.
            return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        return _View(number, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        regathered = sources[saved.number].index_select(0, attended.tokens)
        return regathered.as_strided(saved.size, saved.stride, saved.offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
