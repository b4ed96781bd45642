"""Actions of a pipeline schedule, and their text form: ``3F7`` is F of microbatch 7 on stage 3, as
in torch.distributed.pipelining. A schedule is rows of actions, one row a rank."""

from __future__ import annotations

import enum
import functools
import re
from typing import NamedTuple, Self

from megatron_ext.base.words import shown


class Kind(enum.StrEnum):
    """Kinds of actions of a schedule. The letters are those of `torch.distributed.pipelining`.

    The zero-bubble papers write B for the input gradient. This project writes I for the input
    gradient, and B for the whole backward pass: I and the weight gradient W in one. R recomputes
    the activations that the forward pass F did not store (`transforms.recompute`).
    """

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    FULL_BACKWARD = "B"
    RECOMPUTE = "R"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_F = "WAIT_F"
    WAIT_B = "WAIT_B"
    # Vocabulary parallelism: passes for a rank's shard of the embedding and of the output layer.
    # Their stage is the rank's first stage.
    LOGITS = "S"
    LOGITS_INPUT = "SI"
    LOGITS_WEIGHT = "SW"
    LOSS = "L"
    EMBEDDING = "E"
    EMBEDDING_WEIGHT = "EW"
    BCAST_S = "BCAST_S"
    GATHER_S = "GATHER_S"
    REDUCE_SI = "REDUCE_SI"
    BCAST_SW = "BCAST_SW"
    BCAST_E = "BCAST_E"
    REDUCE_E = "REDUCE_E"
    BCAST_EW = "BCAST_EW"
    WAIT_S = "WAIT_S"
    WAIT_SI = "WAIT_SI"
    WAIT_E = "WAIT_E"
    # Activation offload: copies of the tensors that F stores for I, and that I stores for W.
    OFFLOAD_F = "OFFLOAD_F"
    FREE_F = "FREE_F"
    RELOAD_F = "RELOAD_F"
    OFFLOAD_I = "OFFLOAD_I"
    FREE_I = "FREE_I"
    RELOAD_I = "RELOAD_I"
    # Post-validation: actions that occur once a step, on each rank's first stage.
    RECV_P = "RECV_P"
    STEP = "STEP"
    SEND_P = "SEND_P"
    RECV_V = "RECV_V"
    SETTLE = "SETTLE"
    SEND_V = "SEND_V"

    __hash__ = str.__hash__  # the hash of strings, since Enum's own hash is slow Python code


class Slice(int):
    """A slice of a microbatch along its sequence: ``7.2`` is slice 2 of microbatch 7.

    The slices of a step are numbered consecutively, ``microbatch * slices + slice``, and this
    number takes the place of the microbatch's number in an `Action`. Code that stores tensors,
    messages or times by stage and microbatch therefore need not know of slices. The result of
    arithmetic with a slice is a plain number.

    Attributes:
        microbatch: the microbatch of the slice.
        slice: number of the slice within its microbatch, from 0.
        ends: end of each slice of a microbatch, as a share of the sequence.
    """

    microbatch: int
    slice: int
    ends: tuple[float, ...]

    def __new__(cls, microbatch: int, slice: int, ends: tuple[float, ...]) -> Self:
        assert 0 <= slice < len(ends)
        made = super().__new__(cls, microbatch * len(ends) + slice)
        made.microbatch, made.slice, made.ends = microbatch, slice, ends
        return made

    def __reduce__(self) -> tuple[type[Slice], tuple[int, int, tuple[float, ...]]]:
        return type(self), (self.microbatch, self.slice, self.ends)

    @property
    def slices(self) -> int:
        """Number of slices into which the microbatch of this slice is cut."""
        return len(self.ends)

    @property
    def begin(self) -> float:
        """Start of the slice in its microbatch, as a share of the sequence from 0 to 1."""
        return self.ends[self.slice - 1] if self.slice else 0.0

    @property
    def end(self) -> float:
        return self.ends[self.slice]

    @property
    def is_first(self) -> bool:
        return self.slice == 0

    @property
    def is_last(self) -> bool:
        return self.slice == self.slices - 1

    def __str__(self) -> str:
        return f"{self.microbatch}.{self.slice}"


def whole_of(microbatch: int) -> int:
    """Return ``microbatch`` if it is a whole one; if it is a slice, the microbatch of the slice."""
    return microbatch.microbatch if isinstance(microbatch, Slice) else microbatch


def token_share(microbatch: int) -> float:
    """Return the share of a microbatch's tokens: 1 for a whole microbatch, less for a slice."""
    return microbatch.end - microbatch.begin if isinstance(microbatch, Slice) else 1.0


@functools.lru_cache(maxsize=8)  # cached, as it is called for each action of a file
def even_ends(slices: int) -> tuple[float, ...]:
    """Return the ends of ``slices`` slices of equal length, as shares of their sequence."""
    return tuple(number / slices for number in range(1, slices + 1))


def slices_of(microbatch: int, ends: tuple[float, ...]) -> tuple[int, ...]:
    """Return the slices of ``microbatch`` along its sequence, in order.

    ``ends`` are the ends of the slices, as shares of the sequence. If there are fewer than two, the
    microbatch is not cut, and the result is the whole ``microbatch``.
    """
    if len(ends) < 2:
        return (microbatch,)
    return tuple(Slice(microbatch, number, ends) for number in range(len(ends)))


class Action(NamedTuple):
    """One kind of work for one microbatch on one stage. ``str`` gives a text such as ``3F7``.

    ``3F7`` is the forward pass of microbatch 7 on stage 3; `parse_action` reads this form. If
    microbatches are cut into slices along their sequence, ``microbatch`` is a `Slice`: ``3F7.2`` is
    the forward pass of slice 2 of microbatch 7.

    ``3SEND_F7`` sends the output of ``3F7`` to stage 4; ``4RECV_F7`` receives it there.
    ``4SEND_B7`` sends the gradient of stage 4's input to stage 3; ``3RECV_B7`` receives it there.
    ``3WAIT_F7`` and ``4WAIT_B7`` wait until the send has completed and free its tensor.

    ``3R7`` recomputes, from the input that stage 3 has stored, the activations of ``3F7`` that the
    backward pass needs (Liu et al. 2025).

    Vocabulary parallelism (Yeung et al. 2024, whose T is SI and SW). ``3S7`` computes logits and
    their statistics on the shard of the rank whose first stage is 3, ``3SI7`` the shard's part of
    the gradient of the last hidden states, ``3SW7`` the gradient of the shard, and ``3L7`` the
    loss, once all statistics are there. ``3E7`` looks tokens up in the shard of the embedding,
    ``3EW7`` computes that shard's gradient. ``BCAST_k`` brings every rank the input of the pass k;
    ``GATHER_S`` and ``REDUCE_k`` combine the outputs of the pass k. On ranks that do not use the
    combined output, ``3WAIT_k7`` waits until the rank's own part has been sent and frees its
    tensor.

    Activation offload (Wan et al. 2025). ``3OFFLOAD_F7`` starts to copy the tensors that ``3F7``
    has stored for the backward pass to the host, ``3FREE_F7`` waits for the copy and frees their
    memory, and ``3RELOAD_F7`` allocates memory and starts to copy them back. ``3OFFLOAD_I7``,
    ``3FREE_I7`` and ``3RELOAD_I7`` do the same with the tensors that the input gradient ``3I7``
    stores for the weight gradient ``3W7``.

    Post-validation (Qi et al. 2024), once a step for the rank whose first stage is 3: ``3RECV_P0``
    receives the combined gradient state of the ranks of all earlier stages, ``3STEP0`` adds the
    rank's own state and steps the optimizer, ``3SEND_P0`` sends the sum to the next rank. In the
    next step ``3RECV_V0`` receives the verdict on that optimizer step, ``3SEND_V0`` sends the
    verdict to the previous rank, and ``3SETTLE0`` blocks the rank until the verdict has come.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Row = tuple[Action, ...]  # actions of a rank, in order
Rows = tuple[Row, ...]  # rows of all ranks, by rank


class OverlappedPasses(NamedTuple):
    """Two passes of a rank that run overlapped, as one action: a forward and a backward pass.

    The backward pass (I or B) does not depend on the forward pass. ``str`` gives torch's form,
    ``(0F1;4I0)OVERLAP_F_B``.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


_TEXT = re.compile(r"(\d+)([A-Z_]+)(\d+)(?:\.(\d{1,9}))?")
_SLICE = re.compile(r"[A-Z_]\d+\.(\d{1,9})")  # microbatch and slice after the last letter of a kind
COMPOUND = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_BACKWARD = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)
_LONGEST = 40  # largest number of characters of an invalid action that an error shows


def parse_action(text: str, slices: int = 1) -> Action:
    """Return the action that ``text`` names, such as ``3F7``. This is the inverse of ``str``.

    Args:
        slices: number of slices of each microbatch along its sequence; with 1, actions name no
            slice.

    Raises:
        ValueError: ``text`` is no action, or its slice does not fit ``slices``.
    """
    text = text.strip()
    match = _TEXT.fullmatch(text)
    if match is None or match[2] not in set(Kind):
        raise ValueError(
            f"{_shown(text)!r} is not an action: write stage, kind and microbatch, as in 3F7"
        )
    stage, kind, microbatch = int(match[1]), Kind(match[2]), int(match[3])
    if match[4] is None and slices == 1:
        return Action(stage, kind, microbatch)
    if match[4] is None:
        raise ValueError(
            f"{_shown(text)} names no slice of its microbatch, and other actions do: write "
            f"{_shown(text)}.0"
        )
    if slices == 1:
        raise ValueError(
            f"{_shown(text)} names a slice of its microbatch, and microbatches are not cut into "
            "slices here"
        )
    if int(match[4]) >= slices:
        raise ValueError(
            f"{_shown(text)} names slice {match[4]} of its microbatch, and slices are numbered 0 "
            f"to {slices - 1}"
        )
    return Action(stage, kind, Slice(microbatch, int(match[4]), even_ends(slices)))


def parse_overlapped(text: str, slices: int = 1) -> OverlappedPasses | None:
    """Return the overlapped passes that a text such as ``(0F1;4I0)OVERLAP_F_B`` names, else None.

    This is the inverse of ``str(OverlappedPasses)``.

    Raises:
        ValueError: one of the two actions cannot be parsed (`parse_action`).
    """
    compound = COMPOUND.fullmatch(text.strip())
    parts = [parse_action(part, slices) for part in compound[1].split(";")] if compound else []
    is_overlapped = len(parts) == 2 and parts[0].kind == Kind.FORWARD and parts[1].kind in _BACKWARD
    return OverlappedPasses(*parts) if is_overlapped else None


def slices_named(text: str) -> int:
    """Return how many slices of a microbatch the actions in a schedule's ``text`` name, or 1.

    Raises:
        ValueError: some slice below the largest is not named. This bounds the memory for slices by
            the length of ``text``, even if a typing error makes a huge number.
    """
    named = {int(match[1]) for match in _SLICE.finditer(text)}
    missing = next((number for number in range(len(named)) if number not in named), None)
    if missing is not None:
        most = max(named)
        found = next(match for match in _SLICE.finditer(text) if int(match[1]) == most)
        line = 1 + text.count("\n", 0, found.start())
        raise ValueError(
            f"line {line}: an action is of slice {most}, but no action is of slice {missing}; "
            "slices are numbered from 0 without gaps"
        )
    return max(len(named), 1)


def _shown(text: str) -> str:
    return shown(text, _LONGEST)
