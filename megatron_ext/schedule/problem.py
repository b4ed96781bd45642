"""The problem that a schedule solves.

A family is a function from a problem to a schedule, so everything that may change a schedule is in
the problem: the placement, the microbatches, the costs, the memory limit and the options. Options
that do not go together are declared here too, with the reasons that errors give.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from megatron_ext.schedule.action import slices_of, token_share
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.slices import UNCUT, Slices, lengths_of
from megatron_ext.schedule.stock_executor import StockExecutor


class P2P(enum.StrEnum):
    """How messages between stages share communicators.

    Either each channel has a communicator, or all channels share one. On a shared communicator
    batches of messages run one after the other, and the graph of dependencies includes this order.
    """

    ASYNC = "async"  # each channel has a communicator, and every message is sent by itself
    BATCHED = "batched"  # all messages use the pipeline's one communicator


class VocabularyParallel(enum.StrEnum):
    """How embedding and output layer are partitioned over ranks (Yeung et al. 2024, section 4)."""

    NONE = "none"  # embedding and output layer are whole, on the first and the last stage
    # The vocabulary is split over all ranks, and the input gradient is computed once the softmax
    # statistics of all ranks are known.
    ONE = "1"
    # The vocabulary is split over all ranks, and the input gradient is computed before the softmax
    # statistics of all ranks are known, which saves one exchange.
    TWO = "2"


class Offload(enum.StrEnum):
    """Choices of the activations that are offloaded to host memory (Wan et al. 2025)."""

    NONE = "none"
    # Half of each rank's chunks are offloaded: those whose activations are stored longer.
    HALF = "half"
    FULL = "full"  # as many activations are offloaded as the host link carries without delay
    FIT = "fit"  # as few activations are offloaded as the memory limit permits


@dataclass(frozen=True)
class Recompute:
    """Choice of the stages that free their activations after F, except their input.

    The backward pass needs the recomputed activations (Liu et al. 2025).

    Attributes:
        fit: recompute the fewest activations with which each rank is within the memory limit.
        first: number of leading stages of the model to recompute, whose activations wait the
            longest.
    """

    fit: bool = False
    first: int = 0

    def __str__(self) -> str:
        return "fit" if self.fit else f"first:{self.first}" if self.first else "none"


def parse_recompute(text: str, name: str = "recompute") -> Recompute:
    """Return the setting of recomputation that ``text`` names: ``none``, ``fit`` or ``first:2``.

    Args:
        name: name of the setting in errors.

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
class ScheduleOptions:
    """Options of a schedule in addition to the order of its passes.

    The fields have the names of the settings, except for ``steps_overlap`` (`setting_of`). A
    field's ``phrase`` is the name of the option in errors, with {} for its value. A family is a
    function that generates a schedule; it sees only some of the options.

    Attributes:
        p2p: how messages share communicators.
        vocab_parallel: how embedding and output layer are partitioned over the ranks. (Families do
            not see it: a transform adds the passes.)
        activation_offload: which activations are offloaded to host memory. (Families see neither it
            nor the memory limit: a transform adds the copies.)
        recompute: which activations are recomputed. (Families do not see it, unless they choose the
            activations themselves, as `Traits.fits_recompute` says: `transforms.recompute` adds the
            passes.)
        steps_overlap: whether the optimizer steps before all ranks are done, and is rolled back if
            that was wrong. Steps overlap then, and cost about their span. (Families see it, as
            another schedule may then be the best; a transform adds the messages.)
        slices: how microbatches are cut along their sequence. (Families see it.)
        pairs: whether forward and backward passes run as one, at the same time. (Families see it;
            `transforms.pairs` chooses them.)
    """

    p2p: P2P = field(default=P2P.ASYNC, metadata={"phrase": "p2p {}"})
    vocab_parallel: VocabularyParallel = field(
        default=VocabularyParallel.NONE, metadata={"phrase": "vocabulary parallelism {}"}
    )
    activation_offload: Offload = field(default=Offload.NONE, metadata={"phrase": "offload {}"})
    recompute: Recompute = field(default=Recompute(), metadata={"phrase": "recompute {}"})
    steps_overlap: bool = field(default=False, metadata={"phrase": "post-validation"})
    slices: Slices = field(default=UNCUT, metadata={"phrase": "division into {.count} slices"})
    pairs: bool = field(default=False, metadata={"phrase": "pairing of passes"})

    @property
    def conflict(self) -> Conflict | None:
        """First conflict between two requested schedule options; None if there is no conflict."""
        given = set(self.requested)
        return next((one for one in CONFLICTS if given.issuperset(one.options)), None)

    @property
    def requested(self) -> list[str]:
        """Names of the schedule options that differ from their defaults."""
        return [option.name for option in fields(self) if self.requests(option.name)]

    def requests(self, option: str) -> bool:
        """Return whether the value of the schedule ``option`` differs from its default."""
        return bool(getattr(self, option) != getattr(ScheduleOptions, option))

    def phrase(self, option: str) -> str:
        """Return the words for the schedule ``option`` in errors, with its value."""
        return _PHRASES[option].format(getattr(self, option))

    @staticmethod
    def name_of(option: str) -> str:
        """Return the words for the schedule ``option`` in errors, without its value."""
        return _PHRASES[option].removesuffix(" {}")


_PHRASES = {option.name: option.metadata["phrase"] for option in fields(ScheduleOptions)}


@dataclass(frozen=True)
class Conflict:
    """Two schedule options that exclude each other. ``why`` is the end of an error about them."""

    options: tuple[str, str]
    why: str

    def text(self, first: str, second: str) -> str:
        """Return the error about the two options in conflict, called ``first`` and ``second``."""
        return f"{first} does not go with {second}: {self.why}; drop one"


CONFLICTS = (
    Conflict(("p2p", "vocab_parallel"), "collectives need communicators of their own"),
    Conflict(
        ("activation_offload", "recompute"),
        "an activation is either copied to the host or recomputed",
    ),
    Conflict(("steps_overlap", "p2p"), "a batch of messages could be under way at the verdict"),
    Conflict(
        ("steps_overlap", "vocab_parallel"),
        "collectives of the vocabulary make all ranks wait before the verdict is known",
    ),
    Conflict(
        ("steps_overlap", "activation_offload"),
        "a copy of an activation to the host cannot be undone",
    ),
    Conflict(("slices", "vocab_parallel"), "the vocabulary's passes take whole microbatches"),
    Conflict(
        ("slices", "steps_overlap"),
        "passes of a microbatch's first slices cannot be undone at the verdict",
    ),
    Conflict(
        ("pairs", "vocab_parallel"), "a pair's stages have their own embedding and output layer"
    ),
    Conflict(
        ("pairs", "recompute"),
        "a pair's backward pass takes its activations layer by layer as they are",
    ),
    Conflict(
        ("pairs", "activation_offload"), "overlapped passes need their activations on the device"
    ),
    Conflict(
        ("pairs", "steps_overlap"),
        "a backward pass that overlaps a forward pass cannot be undone",
    ),
    Conflict(("pairs", "slices"), "a pair runs whole microbatches"),
)


@dataclass(frozen=True)
class Problem:
    """The step that a schedule is made for: placement, microbatches, costs and options.

    A schedule family is a function from a problem to a schedule.

    Attributes:
        placement: which rank holds which stage.
        microbatches: number of microbatches of one training step, at least 1.
        costs: seconds per stage and kind, and per message.
        memory_limit: limit of each rank's memory; None is no limit.
        forward_only: whether the step is one of evaluation, where nothing is differentiated and no
            activations are stored.
        options: the options in addition to the order of passes.
        first_trained_stage: the first stage with anything to train. Earlier stages have only
            forward passes, which store nothing. (Families do not see it:
            `transforms.omitted_backward` removes the backward passes of these stages.)
        stock: Megatron's own pipeline functions, if they and not this project's executor run the
            step (`executor`). Only the times of a step depend on it: not its program, nor its
            memory.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    memory_limit: MemoryLimit | None = None
    forward_only: bool = False
    options: ScheduleOptions = ScheduleOptions()
    first_trained_stage: int = 0
    stock: StockExecutor | None = None

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"the number of microbatches is {self.microbatches}; write 1 or more")
        offload = self.options.activation_offload
        if offload is not Offload.NONE and self.costs.host is None:
            raise ValueError(
                f"offload {offload}: the costs ({self.costs.origin}) lack the times of copies to "
                "the host and back: add d2h= and h2d=, seconds for a microbatch on all stages of "
                "a rank"
            )
        if offload is Offload.FIT and self.memory_limit is None:
            raise ValueError(
                f"offload {offload} copies as much as a memory limit requires, and there is none: "
                f"give a memory limit, or write {Offload.FULL} or {Offload.HALF}"
            )
        self._check_recompute()
        if (conflict := self.options.conflict) is not None:
            raise ValueError(conflict.text(*map(self.options.phrase, conflict.options)))
        if self.options.steps_overlap:
            self._check_chain()
        assert self.costs.stages == self.placement.stages
        lengths = {self.microbatches, *map(len, self.costs.at_places.values())}
        assert len(lengths) == 1 and not (self.costs.at_places and self.slices.count > 1)
        assert 0 <= self.first_trained_stage <= self.placement.last
        # With a partitioned embedding the first stage has to compute gradients, so it counts as
        # trained.
        assert (
            not self.first_trained_stage or self.options.vocab_parallel is VocabularyParallel.NONE
        )

    def _check_recompute(self) -> None:
        recompute, stages = self.options.recompute, self.placement.stages
        if recompute.fit and self.memory_limit is None:
            raise ValueError(
                f"recompute {recompute} recomputes as much as a memory limit requires, and there "
                f"is none: give a memory limit, or write {Recompute(first=stages)} for all stages"
            )
        if recompute.first > stages:
            raise ValueError(
                f"recompute {recompute}: the pipeline has only {stages} stages; write "
                f"{Recompute(first=stages)} for all"
            )

    def _check_chain(self) -> None:
        firsts = sorted(stages[0] for stages in self.placement.stages_of)
        if firsts != list(range(self.ranks)):
            raise ValueError(
                "post-validation passes the norm of the gradients along the ranks of the first "
                f"{self.ranks} stages, which must be {self.ranks} different ranks, and are "
                f"{self.placement.rank_of[: self.ranks]}; use another placement, or drop "
                "post-validation"
            )

    @property
    def ranks(self) -> int:
        return self.placement.ranks

    @property
    def executor(self) -> StockExecutor | None:
        """Megatron's own pipeline functions, if they run this problem; None if our executor does.

        Only our executor has `options` other than overlapped passes, and can omit backward passes.
        """
        is_plain = not {*self.options.requested} - {"p2p", "pairs"}
        has_all_passes = not (self.forward_only or self.first_trained_stage)
        return self.stock if is_plain and has_all_passes else None

    @property
    def slices(self) -> Slices:
        """How the sequence of each microbatch is cut into slices (`ScheduleOptions.slices`)."""
        return self.options.slices

    @property
    def priced_costs(self) -> Costs:
        """The costs, with W of slices priced as one pass if they are joined."""
        return self.costs.with_slices(joined_weights=self.slices.joined_weights)

    @property
    def pieces(self) -> int:
        """Number of slices in a step, or of microbatches if these are not sliced."""
        return self.microbatches * self.slices.count

    @cached_property
    def forwards(self) -> tuple[int, ...]:
        """Microbatches (or their slices) of a stage's forward passes, in execution order."""
        return tuple(part for k in range(self.microbatches) for part in self.parts(k))

    @cached_property
    def backwards(self) -> tuple[int, ...]:
        """Microbatches (or their slices) of a stage's backward passes, in execution order.

        The slices of a microbatch come in reverse order.
        """
        return tuple(part for k in range(self.microbatches) for part in reversed(self.parts(k)))

    @property
    def orders(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Execution orders of a stage's forward and of its backward passes."""
        return self.forwards, self.backwards

    def parts(self, microbatch: int) -> tuple[int, ...]:
        """Return the slices of ``microbatch`` along its sequence, in order.

        If microbatches are not sliced, the result is ``microbatch`` itself.
        """
        return slices_of(microbatch, self.slice_ends)

    @cached_property
    def examples(self) -> tuple[int, ...]:
        """Microbatches, or slices of one microbatch, whose passes differ in cost.

        Every other microbatch costs the same as one of these.
        """
        return tuple(range(self.microbatches)) if self.costs.at_places else self.parts(0)

    @cached_property
    def slice_ends(self) -> tuple[float, ...]:
        """End of each slice of a microbatch, as a share of the sequence from 0 to 1."""
        return self.slices.ends(self.costs.attention_share)

    @property
    def held_by_1f1b(self) -> float:
        """Largest number of microbatches whose activations the first of p ranks stores under 1F1B.

        Without slices this is p; with slices of a sequence, one microbatch and p-1 of its longest
        slices.
        """
        return 1 + (self.ranks - 1) * max(map(token_share, self.parts(0)))

    def slice_lengths(self, tokens: int, multiple_of: int = 1) -> tuple[int, ...]:
        """Return the number of tokens of each slice of a sequence of ``tokens``, as multiples of
        ``multiple_of``.

        Raises:
            ValueError: such lengths do not exist, or the given ones do not sum up to ``tokens``.
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

    def with_options(self, **changes: Any) -> Problem:
        """Return a copy of this problem in which the given schedule `options` are replaced."""
        return replace(self, options=replace(self.options, **changes))
