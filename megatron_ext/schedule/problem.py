"""The problem that a schedule solves."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from megatron_ext.schedule.action import parts_of, tokens_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.slices import UNCUT, Slices, lengths_of


class P2P(enum.StrEnum):
    """How messages share communicators. On one, batches move one after the other (`graph`)."""

    ASYNC = "async"  # a communicator a channel, and every message by itself
    BATCHED = "batched"  # the pipeline's one communicator


class VocabularyParallel(enum.StrEnum):
    """How embedding and output layer are divided over the ranks (Yeung et al. 2024, section 4)."""

    NONE = "none"  # not: they are on the first and the last stage
    ONE = "1"  # over all ranks; the input gradient is made when all statistics are there
    TWO = "2"  # the same, but before: one exchange less between logits and input gradient


class Offload(enum.StrEnum):
    """Which activations leave for host memory until they are needed (Wan et al. 2025)."""

    NONE = "none"
    HALF = "half"  # the longer-lived half of a rank's chunks
    FULL = "full"  # all that host copies are quick enough for
    FIT = "fit"  # the fewest that bring each rank within the memory limit


@dataclass(frozen=True)
class Recompute:
    """Which activations are given up after F, but for their stage's input, and made again before
    they are needed (Liu et al. 2025).

    Attributes:
        fit: the fewest that bring each rank within the memory limit.
        first: those of the model's first so many stages, on which they wait the longest.
    """

    fit: bool = False
    first: int = 0

    def __str__(self) -> str:
        return "fit" if self.fit else f"first:{self.first}" if self.first else "none"


def parse_recompute(text: str, name: str = "recompute") -> Recompute:
    """``none``, ``fit`` or ``first:2``. ``name``: of the setting, for errors.

    Raises:
        ValueError: ``text`` is none of these.
    """
    match text.split(":"):
        case ["none"]:
            return Recompute()
        case ["fit"]:
            return Recompute(fit=True)
        case ["first", count] if count.isdecimal() and int(count):
            return Recompute(first=int(count))
    raise ValueError(
        f"{name} {text}: write none, fit (into the memory limit) or first:N (stages of the "
        f"model, N from 1)"
    )


@dataclass(frozen=True)
class Extras:
    """What is asked of a schedule beside the order of its passes.

    Attributes:
        p2p: how messages share communicators.
        vocabulary: how embedding and output layer are divided over the ranks. (Families are asked
            without: `transforms.vocabulary` adds the passes.)
        offload: which activations leave for host memory. (Families are asked without it and
            without the memory limit: `transforms.offload` adds the copies.)
        recompute: which activations are given up and made again. (Families are asked without it:
            `transforms.recompute` adds the passes.)
        post_validation: the optimizer steps before all ranks are done, and is taken back where that
            was wrong: steps overlap, and cost about their span. (Families see it, as another
            schedule may then be the best; `transforms.post_validation` adds the messages.)
        slices: how microbatches are cut along their sequence. (Families see it.)
        pairs: forward and backward passes that run as one, side by side. (Families see it;
            `transforms.pairs` says which.)
    """

    p2p: P2P = P2P.ASYNC
    vocabulary: VocabularyParallel = VocabularyParallel.NONE
    offload: Offload = Offload.NONE
    recompute: Recompute = Recompute()
    post_validation: bool = False
    slices: Slices = UNCUT
    pairs: bool = False

    @property
    def clash(self) -> Clash | None:
        """The first two of these that do not go together, if any do not."""
        asked = {extra.name for extra in fields(self) if getattr(self, extra.name) != extra.default}
        return next((clash for clash in CLASHES if asked.issuperset(clash.extras)), None)


@dataclass(frozen=True)
class Clash:
    """Two of `Extras` that do not go together. ``why``: the end of an error about two settings;
    ``text``: the whole error about a `Problem`."""

    extras: tuple[str, str]
    why: str
    text: str


CLASHES = (
    Clash(
        ("p2p", "vocabulary"),
        "collectives have communicators of their own; drop one",
        "vocabulary parallelism {vocabulary} does not go with messages {p2p}: its collectives need "
        "communicators of their own; let messages be async, or drop it",
    ),
    Clash(
        ("offload", "recompute"),
        "an activation leaves for the host or is made again; drop one",
        "offload {offload} does not go with recompute {recompute}: an activation leaves for the "
        "host or is made again; drop one",
    ),
    Clash(
        ("post_validation", "p2p"),
        "its messages are not part of batches",
        "post-validation does not go with messages {p2p}: a batch could be under way at the "
        "verdict; drop one",
    ),
    Clash(
        ("post_validation", "vocabulary"),
        "passes of the vocabulary wait for all ranks before a verdict has come",
        "post-validation does not go with vocabulary parallelism {vocabulary}: its collectives "
        "hold all ranks up; drop one",
    ),
    Clash(
        ("post_validation", "offload"),
        "what has left for the host cannot be dropped",
        "post-validation does not go with offload {offload}: what has left for the host cannot be "
        "undone; drop one",
    ),
    Clash(
        ("slices", "vocabulary"),
        "the vocabulary's passes take whole microbatches; drop one",
        "{slices.count} slices do not go with vocabulary parallelism {vocabulary}: its passes take "
        "whole microbatches; drop one",
    ),
    Clash(
        ("slices", "post_validation"),
        "what a microbatch's first slices have done before the verdict cannot be undone; drop one",
        "{slices.count} slices do not go with post-validation: what a microbatch's first slices "
        "have done before the verdict cannot be undone; drop one",
    ),
    Clash(
        ("pairs", "vocabulary"),
        "a pair's stages have their own embedding and output layer; drop one",
        "pairs of passes do not go with vocabulary parallelism {vocabulary}: a pair's stages have "
        "their own embedding and output layer; drop one",
    ),
    Clash(
        ("pairs", "recompute"),
        "a pair's backward pass takes its activations layer by layer as they are; drop one",
        "pairs of passes do not go with recompute {recompute}: a pair's backward pass takes its "
        "activations layer by layer as they are; drop one",
    ),
    Clash(
        ("pairs", "offload"),
        "the two of a pair keep their activations on the device; drop one",
        "pairs of passes do not go with offload {offload}: the two of a pair keep their "
        "activations on the device; drop one",
    ),
    Clash(
        ("pairs", "post_validation"),
        "a backward pass that runs beside a forward pass cannot be undone; drop one",
        "pairs of passes do not go with post-validation: a backward pass that runs beside a "
        "forward pass cannot be undone; drop one",
    ),
    Clash(
        ("pairs", "slices"),
        "a pair runs whole microbatches; drop one",
        "pairs of passes do not go with {slices.count} slices: a pair runs whole microbatches; "
        "drop one",
    ),
)


@dataclass(frozen=True)
class Problem:
    """What a family has to solve.

    Attributes:
        placement: which rank holds which stage.
        microbatches: m >= 1 of one training step.
        costs: seconds per stage and kind, and per hop.
        memory_limit: what no rank may exceed; None is no limit.
        forward_only: evaluation, where nothing is differentiated and nothing is held.
        extras: what is asked beside the order of passes.
        first_trained: the first stage with anything to train. Those before it have forward passes
            alone, which hold nothing. (Families are asked without: `transforms.untrained` takes the
            other passes out.)
    """

    placement: Placement
    microbatches: int
    costs: Costs
    memory_limit: MemoryLimit | None = None
    forward_only: bool = False
    extras: Extras = Extras()
    first_trained: int = 0

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(
                f"the number of microbatches is {self.microbatches}; at least one is needed"
            )
        offload = self.extras.offload
        if offload is not Offload.NONE and self.costs.host is None:
            raise ValueError(
                f"offload {offload}: the costs ({self.costs.origin}) do not say how long copies to "
                f"the host and back take: add d2h= and h2d=, seconds per microbatch of a full rank"
            )
        if offload is Offload.FIT and self.memory_limit is None:
            raise ValueError(
                f"offload {offload} has no memory limit to fit into: give one, or write "
                f"{Offload.FULL} or {Offload.HALF}"
            )
        self._check_recompute()
        if (clash := self.extras.clash) is not None:
            raise ValueError(clash.text.format(**vars(self.extras)))
        if self.extras.post_validation:
            self._check_chain()
        assert self.costs.stages == self.placement.stages
        assert 0 <= self.first_trained <= self.placement.last
        # A divided embedding has gradients of the first stage.
        assert not self.first_trained or self.extras.vocabulary is VocabularyParallel.NONE

    def _check_recompute(self) -> None:
        recompute, stages = self.extras.recompute, self.placement.stages
        if recompute.fit and self.memory_limit is None:
            raise ValueError(
                f"recompute {recompute} has no memory limit to fit into: give one, or write "
                f"{Recompute(first=stages)} for all stages"
            )
        if recompute.first > stages:
            raise ValueError(
                f"recompute {recompute}: the pipeline has {stages} stages; write "
                f"{Recompute(first=stages)} for all"
            )

    def _check_chain(self) -> None:
        firsts = sorted(stages[0] for stages in self.placement.stages_of)
        if firsts != list(range(self.ranks)):
            raise ValueError(
                f"post-validation passes the optimizer's state from the rank of a stage to that of "
                f"the next: the first {self.ranks} stages have to be on {self.ranks} ranks, and "
                f"they are on ranks {self.placement.rank_of[: self.ranks]}; use another placement, "
                f"or drop it"
            )

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def slices(self) -> Slices:
        """How microbatches are cut."""
        return self.extras.slices

    @property
    def pieces(self) -> int:
        """How many slices a step has; microbatches, where they are not cut."""
        return self.microbatches * self.slices.count

    @cached_property
    def forwards(self) -> tuple[int, ...]:
        """What the forward passes of a stage are of, in their order."""
        return tuple(part for k in range(self.microbatches) for part in self.parts(k))

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """The same of backward passes and weight gradients."""
        return tuple(part for k in range(self.microbatches) for part in reversed(self.parts(k)))

    @property
    def orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`forwards` and `backwards`."""
        return self.forwards, self.backwards

    def parts(self, microbatch: int) -> tuple[int, ...]:
        """The slices of ``microbatch``, in order; itself, if microbatches are not cut."""
        return parts_of(microbatch, self.slice_ends)

    @cached_property
    def slice_ends(self) -> tuple[float, ...]:
        """Where each slice ends, as shares of the sequence."""
        return self.slices.ends(self.costs.attention_share)

    @property
    def held_by_1f1b(self) -> float:
        """The microbatches that the first rank holds at the most under 1F1B of these slices: p, or
        one and p-1 slices."""
        return 1 + (self.ranks - 1) * max(map(tokens_of, self.parts(0)))

    def slice_lengths(self, tokens: int, multiple_of: int = 1) -> tuple[int, ...]:
        """The tokens of each slice of a sequence of ``tokens``, multiples of ``multiple_of``.

        Raises:
            ValueError: they cannot be, or are given and do not sum up to ``tokens``.
        """
        lengths = self.slices.lengths
        if isinstance(lengths, tuple):
            if sum(lengths) != tokens or any(length % multiple_of for length in lengths):
                raise ValueError(
                    f"slice lengths {self.slices} sum up to {sum(lengths)}; the sequence has "
                    f"{tokens} tokens, and each length has to be a multiple of {multiple_of}"
                )
            return lengths
        return lengths_of(self.slice_ends, tokens, multiple_of)

    def with_extras(self, **changes: Any) -> Problem:
        """The same problem with some of its `extras` replaced."""
        return replace(self, extras=replace(self.extras, **changes))
