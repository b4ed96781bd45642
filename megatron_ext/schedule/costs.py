"""Costs of passes: seconds per stage, seconds per message, bytes held.

Costs are given per kind. A kind that does the work of others (`Rule.covers`) costs their sum: a
fused backward B costs I + W. The text form is in costs_text.py.

`Costs` consists of parts. Seconds and bytes are tuples, not arrays, because caches use their repr
as a key, and numpy shortens it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any, Self

from megatron_ext.schedule.action import Action, Kind, Slice, token_share
from megatron_ext.schedule.kinds import RULES, Cost, Held, Lane
from megatron_ext.schedule.placement import Neighbour, Placement


@dataclass(frozen=True)
class VocabularyCosts:
    """Costs of a microbatch in embedding and output layer, if these are not partitioned.

    Attributes:
        output_layer: seconds of the output layer and the loss, for F, I and W.
        embedding: seconds of the lookup, and of its weight's gradient.
        logits_bytes: bytes of all logits, which the loss keeps in fp32 from F to I.
        deferred_bytes: bytes that the output layer holds from I to W if its weight gradient is
            deferred to W: its input, and the gradient of the logits in the type of the layers.
        launch: seconds that each pass of a vocabulary shard takes in addition, if embedding and
            output layer are partitioned over all ranks.
        rescaling: seconds that all shards together take to correct the softmax by the sums of the
            other shards.
        contention: shares by which the layers' F, and their I and W, take longer during the
            collectives of vocabulary shards.
        fixed_output_layer: seconds of ``output_layer`` that each slice takes whatever its number of
            tokens (`SliceCosts.fixed`).
        fixed_embedding: seconds of ``embedding`` that each slice takes likewise.
    """

    output_layer: tuple[float, float, float] = (0.0, 0.0, 0.0)
    embedding: tuple[float, float] = (0.0, 0.0)
    logits_bytes: float = 0.0
    deferred_bytes: float = 0.0
    launch: float = 0.0
    rescaling: float = 0.0
    contention: tuple[float, float] = (0.0, 0.0)
    fixed_output_layer: tuple[float, float, float] = (0.0, 0.0, 0.0)
    fixed_embedding: tuple[float, float] = (0.0, 0.0)

    @property
    def of_ends(self) -> Mapping[Kind, tuple[float, float]]:
        """Seconds of the embedding (first stage) and output layer (last stage), by kind of pass."""
        return _of_ends(self.embedding, self.output_layer)

    @property
    def fixed_of_ends(self) -> Mapping[Kind, tuple[float, float]]:
        """Seconds of `of_ends` that each slice takes whatever its number of tokens."""
        return _of_ends(self.fixed_embedding, self.fixed_output_layer)


def _of_ends(
    embedding: tuple[float, float], output_layer: tuple[float, float, float]
) -> Mapping[Kind, tuple[float, float]]:
    lookup, table_gradient = embedding
    forward, input_gradient, weight_gradient = output_layer
    return {
        Kind.FORWARD: (lookup, forward),
        Kind.BACKWARD_INPUT: (0.0, input_gradient),
        Kind.BACKWARD_WEIGHT: (table_gradient, weight_gradient),
    }


@dataclass(frozen=True)
class TowerCosts:
    """Costs of a microbatch in an encoder on the first stage, such as a vision tower.

    Attributes:
        seconds: seconds of F, I and W, on the rank that the costs were made for.
        activation: bytes that the encoder stores from F to I. The bytes that it stores from I to W
            are in the same proportion to these as those of the layers.
    """

    seconds: tuple[float, float, float]
    activation: float = 0.0


class CostPart:
    """Base class of the parts of `Costs`. Each tuple in a part has one number per stage.

    A field that is not given per stage says so.
    """

    def __post_init__(self) -> None:
        for part in fields(self):  # type: ignore[arg-type]  # each part is a dataclass
            value = getattr(self, part.name)
            for figures in value.values() if isinstance(value, Mapping) else [value]:
                if hasattr(figures, "__len__") and not isinstance(figures, tuple):
                    raise TypeError(
                        f"{part.name} is of type {type(figures).__name__}; write a tuple"
                    )

    def joined(self, rows: Sequence[Sequence[int]], costs: Costs) -> Self:
        """Return this part of ``costs`` after the stages of each row have been joined to one.

        The costs of a joined stage are the sums over its stages.
        """
        named = {part.name: getattr(self, part.name) for part in fields(self)}  # type: ignore[arg-type]
        return type(self)(**{name: _summed(value, rows) for name, value in named.items()})


def _summed(value: Any, rows: Sequence[Sequence[int]]) -> Any:
    if isinstance(value, Mapping):
        return {key: _summed(figures, rows) for key, figures in value.items()}
    if isinstance(value, tuple) and value:
        return tuple(sum(value[stage] for stage in row) for row in rows)
    return value  # other values are not per stage and stay as they are


@dataclass(frozen=True)
class PassCosts(CostPart):
    """Seconds and bytes of compute passes.

    Attributes:
        seconds: seconds per stage, by kind of pass. (Any unit of time will do if all costs share
            it.)
        held_bytes: bytes by kind of memory; None if bytes are not known.
        recompute: seconds of a recomputation R; () if R takes as long as the forward pass.
        fused_backward_saving: seconds saved if W directly follows its I, as in B, because one of
            the two computes while the other waits; () if nothing is saved.
    """

    seconds: Mapping[Kind, tuple[float, ...]]
    held_bytes: Mapping[Held, tuple[float, ...]] | None = None
    recompute: tuple[float, ...] = ()
    fused_backward_saving: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any(map(any, self.seconds.values())):
            raise ValueError("costs: all passes cost nothing; at least one must cost something")

    def spread(self, layers: int, counts: Sequence[int]) -> PassCosts:
        """Return the costs of stages with these ``counts`` of equal layers.

        The present stages together are assumed to have ``layers`` layers.
        """

        def of_stages(figures: tuple[float, ...]) -> tuple[float, ...]:
            return figures and tuple(sum(figures) / layers * count for count in counts)

        held = self.held_bytes
        return PassCosts(
            {kind: of_stages(figures) for kind, figures in self.seconds.items()},
            None if held is None else {what: of_stages(of) for what, of in held.items()},
            of_stages(self.recompute),
            of_stages(self.fused_backward_saving),
        )


@dataclass(frozen=True)
class LinkCosts(CostPart):
    """Seconds and bytes of messages between stages.

    Attributes:
        p2p_seconds: seconds of a message from a stage to the next on another rank; the mean if
            stages differ.
        latency: the part of ``p2p_seconds`` that does not depend on the size of the message.
        p2p_seconds_by_stage: seconds of a message between each stage and the next; () if all take
            ``p2p_seconds``.
        latencies: latency of each of ``p2p_seconds_by_stage``; () if all have ``latency``.
        message_bytes: size of a message from stage to stage, in bytes; 0 if not known.
        states: number of hidden states in a message from each stage to the next: with multi-token
            prediction, those of its depths travel on to the loss as well; () if all messages have
            one.
    """

    p2p_seconds: float = 0.0
    latency: float = 0.0
    p2p_seconds_by_stage: tuple[float, ...] = ()
    latencies: tuple[float, ...] = ()
    message_bytes: float = 0.0
    states: tuple[int, ...] = ()

    def states_behind(self, stage: int) -> int:
        """Return the number of hidden states in a message between ``stage`` and the next."""
        return self.states[stage] if 0 <= stage < len(self.states) else 1

    def joined(self, rows: Sequence[Sequence[int]], costs: Costs) -> LinkCosts:
        """Return the costs of messages after the stages of each row have been joined to one.

        The link between two neighbouring joined stages is the first link between their stages.
        """
        between = [
            next((min(a, b) for a in row for b in following if abs(a - b) == 1), None)
            for row, following in pairwise(rows)
        ]

        def picked[Amount: (int, float)](
            figures: tuple[Amount, ...], mean: Amount
        ) -> tuple[Amount, ...]:
            return figures and tuple(mean if at is None else figures[at] for at in between)

        return replace(
            self,
            p2p_seconds_by_stage=picked(self.p2p_seconds_by_stage, self.p2p_seconds),
            latencies=picked(self.latencies, self.latency),
            states=picked(self.states, 1),
        )


@dataclass(frozen=True)
class SliceCosts(CostPart):
    """Costs of a slice of a sequence that are not proportional to its share of the microbatch.

    Attributes:
        attention: the share of F, and of I and W together, that grows with the square of the
            sequence: as a share of the layers' seconds, without embedding and output layer. In a
            backward pass all of it is in I. () if it is zero or not known.
        fixed: by kind of pass, the seconds that each slice takes whatever its number of tokens, at
            the number of slices that these costs are for: reading weights, adding to their
            gradients, latencies, launching kernels. {} if it is zero or not known.
        keys_values: bytes of a microbatch's keys and values, which are part of the activation; ()
            if not known.
        sharing: number of context-parallel ranks that share each slice; each has one contiguous
            part of it.
        joined_weights: whether the W of all slices are one pass (`Slices.joined_weights`): the
            fixed part of W is then that of the first slice, whose W comes last.
    """

    attention: tuple[float, ...] = ()
    fixed: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    keys_values: tuple[float, ...] = ()
    sharing: int = 1
    joined_weights: bool = False

    def joined(self, rows: Sequence[Sequence[int]], costs: Costs) -> SliceCosts:
        """Return the costs of slices after the stages of each row have been joined to one.

        Attention becomes a share of the seconds of the joined stage.
        """
        joined = super().joined(rows, costs)
        if not self.attention:
            return joined
        squared = [costs.of_attention(Kind.FORWARD, stage) for stage in range(costs.stages)]
        forward = costs.seconds[Kind.FORWARD]
        attention = tuple(
            sum(squared[stage] for stage in row) / (sum(forward[stage] for stage in row) or 1.0)
            for row in rows
        )
        return replace(joined, attention=attention)

    def spread(self, layers: int, counts: Sequence[int], costs: Costs) -> SliceCosts:
        """Return this part of ``costs`` for stages with these ``counts`` of equal layers, as
        `PassCosts.spread`."""
        together = self.joined([range(costs.stages)], costs)

        def of_stages(figures: tuple[float, ...]) -> tuple[float, ...]:
            return figures and tuple(figures[0] / layers * count for count in counts)

        return replace(
            together,
            attention=together.attention * len(counts),
            fixed={kind: of_stages(figures) for kind, figures in together.fixed.items()},
            keys_values=of_stages(together.keys_values),
        )


@dataclass(frozen=True)
class OverlapCosts(CostPart):
    """Seconds that a forward and a backward pass save by overlapping (`OverlappedPasses`).

    Attributes:
        savings: seconds saved by running a forward and a backward pass at the same time instead of
            one after the other. There is a table for each kind of the backward pass, I and B: it
            has a row for each stage of F, and in the row a number for each stage of the backward
            pass. If the table of B is missing, that of I counts for B; {} if nothing is saved.
    """

    savings: Mapping[Kind, tuple[tuple[float, ...], ...]] = field(default_factory=dict)

    def joined(self, rows: Sequence[Sequence[int]], costs: Costs) -> OverlapCosts:
        """Return the savings of overlapped passes after stages of each row have been joined to one.

        Backward passes run through the stages of a row from the last to the first.
        """

        def saved(table: tuple[tuple[float, ...], ...], row: Sequence[int], other: Any) -> float:
            return sum(table[f][b] for f, b in zip(row, reversed(other), strict=False))

        tables = {
            kind: tuple(tuple(saved(table, row, other) for other in rows) for row in rows)
            for kind, table in self.savings.items()
        }
        return replace(self, savings=tables)


@dataclass(frozen=True)
class HostCosts(CostPart):
    """Costs of copies between a rank's GPU memory and host memory (activation offload).

    Attributes:
        seconds: seconds to copy a microbatch's tensors, by kind of copy, one number per stage.
        ranks_per_link: number of consecutive ranks that share a link to the host and take turns.
        duplex: whether a link carries copies in both directions at the same time.
    """

    seconds: Mapping[Kind, tuple[float, ...]]
    ranks_per_link: int = 1
    duplex: bool = True

    @property
    def to_host(self) -> tuple[float, ...]:
        """Seconds to copy a microbatch's stored activations to the host, per stage."""
        return self.seconds[Kind.OFFLOAD_F]

    @property
    def from_host(self) -> tuple[float, ...]:
        """Seconds to copy a microbatch's offloaded activations back, per stage."""
        return self.seconds[Kind.RELOAD_F]

    @property
    def is_shared(self) -> bool:
        """Whether a copy to or from the host may have to wait for another copy on the same link.

        This happens if several ranks share a link, or if a link carries one direction at a time.
        """
        return self.ranks_per_link > 1 or not self.duplex

    def link(self, rank: int, lane: Lane) -> tuple[int, Lane | None]:
        """Return a key of the host link that ``rank`` uses; copies with equal keys take turns.

        The key is the number of the link, and the direction ``lane`` if the link carries both
        directions at the same time, else None.
        """
        return rank // self.ranks_per_link, lane if self.duplex else None


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch on each stage: seconds of passes and messages, and bytes of memory.

    Attributes:
        passes: seconds and bytes of passes.
        links: seconds and bytes of messages.
        slices: costs of slices of a sequence that are not proportional to their share of a
            microbatch.
        host: costs of copies to the host and back; None if not known.
        vocabulary: the embedding's part of the first stage's figures and the output layer's part of
            the last stage's; None if not known.
        overlap: seconds that a forward and a backward pass save by overlapping.
        unpartitioned: the original costs, if these costs are for a vocabulary that is partitioned
            over the ranks.
        slowness: by stage, how many times as long its rank takes as the rank that these costs were
            made for. All seconds of passes include this factor. () if all ranks are alike.
        tower: the part of the first stage's figures that is an encoder's in front of the language
            model; None if there is none, or it is not known.
        at_places: by kind of pass, a factor for each microbatch of a step, in order, on the seconds
            given here; a missing kind of pass takes the same time for all microbatches. {}:
            microbatches are alike. Bytes do not vary: they are those of the largest microbatch.
        origin: how these figures came about, for people to read.
        no_estimate: reason why the seconds of this model cannot be estimated, and those of another
            model stand in their place; "": the seconds are this model's.
    """

    passes: PassCosts
    links: LinkCosts = LinkCosts()
    slices: SliceCosts = SliceCosts()
    host: HostCosts | None = None
    vocabulary: VocabularyCosts | None = None
    overlap: OverlapCosts = OverlapCosts()
    unpartitioned: Costs | None = None
    slowness: tuple[float, ...] = ()
    tower: TowerCosts | None = None
    at_places: Mapping[Kind, tuple[float, ...]] = field(default_factory=dict)
    origin: str = "given"
    no_estimate: str = ""

    @property
    def seconds(self) -> Mapping[Kind, tuple[float, ...]]:
        """Seconds of passes by kind of pass and stage."""
        return self.passes.seconds

    @property
    def held_bytes(self) -> Mapping[Held, tuple[float, ...]] | None:
        """Bytes by kind of memory and stage; None if not known."""
        return self.passes.held_bytes

    def with_passes(self, **changes: Any) -> Costs:
        """Return a copy of the costs with the given fields of `passes` (`PassCosts`) replaced."""
        return replace(self, passes=replace(self.passes, **changes))

    def with_links(self, **changes: Any) -> Costs:
        """Return a copy of the costs with the given fields of `links` (`LinkCosts`) replaced."""
        return replace(self, links=replace(self.links, **changes))

    def without_messages(self) -> Costs:
        """Return a copy of the costs in which messages between stages take no time."""
        return self.with_links(p2p_seconds=0.0, latency=0.0, p2p_seconds_by_stage=(), latencies=())

    def with_slices(self, **changes: Any) -> Costs:
        """Return a copy of the costs with the given fields of `slices` (`SliceCosts`) replaced."""
        return replace(self, slices=replace(self.slices, **changes))

    @property
    def stages(self) -> int:
        return len(self.seconds[Kind.FORWARD])

    def of(self, action: Action) -> float:
        """Return the seconds of ``action``, by the cost rule of its kind (`RULES`)."""
        rule = RULES[action.kind]
        match rule.cost:
            case Cost.PASS:
                seconds = sum(self._of_pass(kind, action) for kind in rule.covers)
                return seconds - (
                    self.fused_backward_saving_by(action) if len(rule.covers) > 1 else 0.0
                )
            case Cost.REPEATED_PASS:
                assert rule.repeats is not None
                return self._of_recompute(rule.repeats, action)
            case Cost.P2P_SECONDS:
                return self._of_message(action)
            case Cost.COLLECTIVE:
                return self.p2p_seconds_of(action.microbatch)
            case Cost.COPY:
                assert self.host is not None
                seconds = self.host.seconds[action.kind][action.stage]
                return seconds * self._share_copied(action)
        return 0.0

    def _share_copied(self, action: Action) -> float:
        """Return the share of a microbatch's activation that an offload or reload copies.

        Keys and values of a slice of a sequence stay on the device, because other slices attend to
        them.
        """
        tokens, held = token_share(action.microbatch), self.held_bytes
        is_slice = isinstance(action.microbatch, Slice)
        if not is_slice or not self.slices.keys_values or held is None:
            return tokens
        if Held.ACTIVATION not in RULES[action.kind].moves or not held[Held.ACTIVATION]:
            return tokens
        activation = held[Held.ACTIVATION][action.stage] or 1.0
        return tokens * max(1 - self.slices.keys_values[action.stage] / activation, 0.0)

    def _of_message(self, action: Action) -> float:
        towards_next = RULES[action.kind].neighbour is Neighbour.NEXT
        behind = action.stage if towards_next else action.stage - 1
        latency = self.links.latencies[behind] if self.links.latencies else self.links.latency
        return _part_of_p2p_seconds(self.p2p_seconds_behind(behind), latency, action.microbatch)

    def p2p_seconds_of(self, part: int) -> float:
        """Return the seconds of a message for ``part``, a microbatch or a slice of one.

        If links differ, the result is the mean over links.
        """
        return _part_of_p2p_seconds(self.links.p2p_seconds, self.links.latency, part)

    def p2p_seconds_behind(self, stage: int) -> float:
        """Return the seconds of a message between ``stage`` and the next, in either direction."""
        by_stage = self.links.p2p_seconds_by_stage
        return by_stage[stage] if by_stage else self.links.p2p_seconds

    def _of_pass(self, kind: Kind, action: Action) -> float:
        """Return the seconds of one ``kind`` of pass (F, I or W) whose work ``action`` does.

        For a slice of a sequence, the time includes attention to the slice itself and to those
        before it.
        """
        seconds = self.seconds[kind][action.stage]
        part = action.microbatch
        if not isinstance(part, Slice):
            return seconds * self._at_place(kind, part) if self.at_places else seconds
        squared = self.of_attention(kind, action.stage)
        rest = seconds - squared
        fixed = min(self._fixed_of(kind, action.stage), rest)
        tokens, attended = token_share(part), part.end**2 - part.begin**2
        if self.slices.joined_weights and action.kind is Kind.BACKWARD_WEIGHT and not part.is_first:
            return (rest - fixed) * tokens
        # The last of the context-parallel ranks that share a slice attends to most tokens, and the
        # other ranks wait for it.
        attended += tokens**2 * (1 - 1 / self.slices.sharing)
        return fixed + (rest - fixed) * tokens + squared * attended

    def _at_place(self, kind: Kind, microbatch: int) -> float:
        """Return the seconds of a pass for ``microbatch`` relative to a mean microbatch."""
        factors = self.at_places.get(kind)
        return 1.0 if factors is None else factors[microbatch]

    def mean_factor(self, kind: Kind) -> float:
        """Return the mean cost factor of a step's microbatches for a ``kind`` of pass."""
        factors = self.at_places.get(kind)
        return 1.0 if factors is None else fmean(factors)

    @property
    def alike(self) -> Costs:
        """A copy of the costs in which all microbatches of a step cost the same."""
        return replace(self, at_places={}) if self.at_places else self

    def _fixed_of(self, kind: Kind, stage: int) -> float:
        """Return the seconds of a pass on ``stage`` that a slice takes however short it is."""
        return self.slices.fixed[kind][stage] if kind in self.slices.fixed else 0.0

    def _of_recompute(self, repeats: Kind, action: Action) -> float:
        """Return the seconds of R (recomputation): as given, or else those of the forward pass.

        A slice of a sequence takes the same share of R as of the forward pass.
        """
        if not self.passes.recompute:
            return self._of_pass(repeats, action)
        recompute = self.passes.recompute[action.stage]
        repeated = self.seconds[repeats][action.stage]
        if not isinstance(action.microbatch, Slice):
            return recompute * self._at_place(repeats, action.microbatch)
        return recompute * (self._of_pass(repeats, action) / repeated if repeated else 1.0)

    def of_attention(self, kind: Kind, stage: int) -> float:
        """Return the seconds of a pass on ``stage`` that grow with the square of the sequence."""
        if not self.slices.attention or kind not in (Kind.FORWARD, Kind.BACKWARD_INPUT):
            return 0.0
        layers = self._of_layers
        if kind is Kind.FORWARD:
            return self.slices.attention[stage] * layers[kind][stage]
        backward = layers[kind][stage] + layers[Kind.BACKWARD_WEIGHT][stage]
        return min(self.slices.attention[stage] * backward, layers[kind][stage])

    def with_slices_of(self, estimate: Costs) -> Costs:
        """Return a copy of the costs that takes the missing costs of slices from ``estimate``.

        The estimated seconds are scaled by the ratio of given to estimated seconds of each pass.
        """
        lacks = []
        if estimate.slices.attention and not self.slices.attention:
            lacks.append("attention")
        if estimate.slices.fixed and not self.slices.fixed:
            lacks.append("short slices")
        if not lacks:
            return self
        made = self if self.slices.fixed else self._with_fixed_of(estimate)
        return replace(
            made.with_slices(
                attention=self.slices.attention or estimate.slices.attention,
                keys_values=self.slices.keys_values or estimate.slices.keys_values,
            ),
            origin=f"{self.origin}; {' and '.join(lacks)} in estimated proportions",
        )

    def _with_fixed_of(self, estimate: Costs) -> Costs:
        """Return these costs with the fixed seconds of ``estimate``, scaled by the ratio of the
        passes in both costs: separately for layers and vocabulary, if both costs have these."""
        if self.vocabulary is None or estimate.vocabulary is None:
            return self.with_slices(fixed=_scaled(estimate.slices.fixed, self, estimate))
        here, there = self.vocabulary, estimate.vocabulary
        of_layers, estimated = self.layers_alone, estimate.layers_alone
        forward, input_gradient, weight_gradient = _in_ratio(
            there.fixed_output_layer, here.output_layer, there.output_layer
        )
        lookup, table_gradient = _in_ratio(there.fixed_embedding, here.embedding, there.embedding)
        vocabulary = replace(
            here,
            fixed_output_layer=(forward, input_gradient, weight_gradient),
            fixed_embedding=(lookup, table_gradient),
        )
        fixed = _scaled(estimated.slices.fixed, of_layers, estimated)
        total = of_layers.with_slices(fixed=fixed).with_vocabulary(vocabulary)
        return replace(self.with_slices(fixed=total.slices.fixed), vocabulary=vocabulary)

    def with_slices_shared_by(self, ranks: int) -> Costs:
        """Return a copy of the costs for slices that ``ranks`` context-parallel ranks share.

        Each of these ranks then holds the keys and values of all.
        """
        shared = self.with_slices(sharing=ranks)
        if ranks == 1 or not self.slices.keys_values or self.held_bytes is None:
            return shared
        activation = tuple(
            held + (ranks - 1) * shard
            for held, shard in zip(
                self.held_bytes[Held.ACTIVATION], self.slices.keys_values, strict=True
            )
        )
        keys_values = tuple(ranks * shard for shard in self.slices.keys_values)
        held_bytes = {**self.held_bytes, Held.ACTIVATION: activation}
        return shared.with_slices(keys_values=keys_values).with_passes(held_bytes=held_bytes)

    @cached_property
    def _of_layers(self) -> Mapping[Kind, tuple[float, ...]]:
        """Seconds of passes without embedding and output layer, by kind of pass and stage.

        The property is cached, because the cost of each slice's pass reads it.
        """
        return self.without_vocabulary().seconds

    @cached_property
    def attention_share(self) -> float:
        """Share of a microbatch's compute time that grows with the square of the sequence length.

        The share is relative to the compute time that slices of the sequence split among them.
        """
        kinds = Kind.FORWARD, Kind.BACKWARD_INPUT
        squared = sum(self.of_attention(k, s) for k in kinds for s in range(self.stages))
        fixed = sum(map(sum, self.slices.fixed.values()))
        return squared / max(sum(map(sum, self.seconds.values())) - fixed, squared or 1.0)

    def fused_backward_saving_by(self, action: Action) -> float:
        """Return the seconds that a full backward pass B saves compared with separate I and W.

        This is `fused_backward_saving_on` of its stage, scaled by the slice's share of the sequence
        and by the cost of this microbatch relative to a mean one.
        """
        saving = self.fused_backward_saving_on(action.stage) * token_share(action.microbatch)
        return saving * self._at_place(Kind.BACKWARD_WEIGHT, action.microbatch)

    def fused_backward_saving_on(self, stage: int) -> float:
        """Return the seconds that a microbatch on ``stage`` saves if W directly follows I."""
        return (
            self.passes.fused_backward_saving[stage] if self.passes.fused_backward_saving else 0.0
        )

    def least_on(self, stages: Iterable[int], slices: int = 1) -> float:
        """Return the least seconds of all passes of one mean microbatch on a rank's ``stages``.

        The microbatch is cut into ``slices`` slices along its sequence.
        """
        saving = self.mean_factor(Kind.BACKWARD_WEIGHT)
        means = [(self.mean_factor(kind), figures) for kind, figures in self.seconds.items()]
        return sum(
            sum(figures[stage] * mean for mean, figures in means)
            + (slices - 1) * self._least_fixed_on(stage)
            - self.fused_backward_saving_on(stage) * saving
            for stage in stages
        )

    def _least_fixed_on(self, stage: int) -> float:
        """Return the seconds that each further slice adds to a microbatch's passes on ``stage``.

        A further slice adds to a kind of pass at most the seconds of that pass without attention.
        """
        return sum(
            min(figures[stage], self.seconds[kind][stage] - self.of_attention(kind, stage))
            for kind, figures in self.slices.fixed.items()
            if not (self.slices.joined_weights and kind is Kind.BACKWARD_WEIGHT)
        )

    def overlap_saving(self, forward: Action, backward: Action) -> float:
        """Return the seconds that a forward and a backward pass save by running at the same time.

        The result is at most the seconds of the shorter pass.
        """
        table = self.overlap.savings.get(backward.kind) or self.overlap.savings.get(
            Kind.BACKWARD_INPUT
        )
        if table is None:
            return 0.0
        saving = table[forward.stage][backward.stage]
        return min(saving, self.of(forward), self.of(backward))

    def of_overlapped(self, forward: Action, backward: Action) -> float:
        """Return the seconds that an overlapped forward and backward pass take together."""
        return self.of(forward) + self.of(backward) - self.overlap_saving(forward, backward)

    def slowed(self, slowness: tuple[float, ...]) -> Costs:
        """Return a copy of the costs for slower ranks, in which each stage's passes take longer.

        ``slowness`` has a factor on the seconds of each stage.
        """

        def slower(figures: tuple[float, ...]) -> tuple[float, ...]:
            return figures and tuple(f * s for f, s in zip(figures, slowness, strict=True))

        vocabulary = self.vocabulary
        if vocabulary is not None:
            first, last = slowness[0], slowness[-1]

            def of_last(figures: tuple[float, float, float]) -> tuple[float, float, float]:
                f, i, w = figures
                return f * last, i * last, w * last

            def of_first(figures: tuple[float, float]) -> tuple[float, float]:
                lookup, table_gradient = figures
                return lookup * first, table_gradient * first

            vocabulary = replace(
                vocabulary,
                output_layer=of_last(vocabulary.output_layer),
                embedding=of_first(vocabulary.embedding),
                fixed_output_layer=of_last(vocabulary.fixed_output_layer),
                fixed_embedding=of_first(vocabulary.fixed_embedding),
            )
        savings = {
            kind: tuple(tuple(f * s for f in row) for row, s in zip(table, slowness, strict=True))
            for kind, table in self.overlap.savings.items()
        }
        return replace(
            self.with_slices(
                fixed={kind: slower(figures) for kind, figures in self.slices.fixed.items()}
            ).with_passes(
                seconds={kind: slower(figures) for kind, figures in self.seconds.items()},
                recompute=slower(self.passes.recompute),
                fused_backward_saving=slower(self.passes.fused_backward_saving),
            ),
            vocabulary=vocabulary,
            overlap=OverlapCosts(savings),
            slowness=slowness,
        )

    def with_tower(self, tower: TowerCosts) -> Costs:
        """Return a copy of the costs that adds the encoder ``tower`` to the first stage."""
        assert self.tower is None and not self.slowness
        return replace(self._with_first_stage(tower, +1), tower=tower)

    def without_tower(self) -> Costs:
        """Return the costs of the language model without its encoder."""
        if self.tower is None:
            return self
        assert not self.slowness
        return replace(self._with_first_stage(self.tower, -1), tower=None)

    @cached_property
    def layers_alone(self) -> Costs:
        """Costs of the layers, without the embedding, the output layer and the encoder."""
        return self.without_vocabulary().without_tower()

    def _with_first_stage(self, tower: TowerCosts, sign: int) -> Costs:
        def added(figures: tuple[float, ...], more: float) -> tuple[float, ...]:
            # Rounding may make the remaining time or memory of the first stage slightly negative.
            return (max(figures[0] + sign * more, 0.0), *figures[1:])

        kinds = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
        more = dict(zip(kinds, tower.seconds, strict=True))
        seconds = {
            kind: added(figures, more.get(kind, 0.0)) for kind, figures in self.seconds.items()
        }
        held = self.held_bytes
        if held is not None:
            activation = added(held[Held.ACTIVATION], tower.activation)
            # The stored inputs of W grow by the same factor as the activation.
            inputs = held[Held.WEIGHT_INPUTS]
            growth = activation[0] / (held[Held.ACTIVATION][0] or 1.0)
            inputs = (inputs[0] * growth, *inputs[1:])
            held = {**held, Held.ACTIVATION: activation, Held.WEIGHT_INPUTS: inputs}
        recompute = self.passes.recompute
        # A recompute pass (R) on the first stage repeats the encoder's forward pass, too.
        recompute = recompute and added(recompute, tower.seconds[0])
        changed = self.with_passes(seconds=seconds, held_bytes=held, recompute=recompute)
        attention = self.slices.attention
        # Attention's share is relative to F without the embedding, to whose time the share does not
        # apply.
        before, after = (
            costs.without_vocabulary().seconds[Kind.FORWARD][0] for costs in (self, changed)
        )
        if attention and after:
            share = attention[0] * before / after
            changed = changed.with_slices(attention=(share, *attention[1:]))
        return changed

    def per_rank(self, placement: Placement) -> Costs:
        """Return the costs of the same model with all chunks of a rank joined to one stage."""
        return self._joined(placement.stages_of)

    def _joined(self, rows: Sequence[Sequence[int]]) -> Costs:
        """Return the costs of the same model after stages have been joined: one for each row.

        The parts of embedding and output layer stay known only if they remain on the first and the
        last of the joined stages.
        """
        stays = 0 in rows[0] and self.stages - 1 in rows[-1]
        costs = self.without_vocabulary() if stays else self

        def joined(value: object) -> object:
            if isinstance(value, Costs):
                return value._joined(rows)
            return value.joined(rows, costs) if isinstance(value, CostPart) else value

        named = {part.name: joined(getattr(costs, part.name)) for part in fields(costs)}
        slowness = self.slowness and tuple(self.slowness[row[0]] for row in rows)
        tower = self.tower if 0 in rows[0] else None
        named |= {"vocabulary": None, "slowness": slowness, "tower": tower}
        made = replace(costs, **named)  # type: ignore[arg-type]
        if self.vocabulary is None or not stays:
            return made
        return made.with_vocabulary(self.vocabulary)

    def with_host(
        self,
        to_host: Sequence[float],
        from_host: Sequence[float],
        ranks_per_link: int = 1,
        duplex: bool = True,
    ) -> Costs:
        """Return a copy of the costs with seconds per stage of copying activations to the host.

        Tensors that only W needs are copied at the same speed. If their bytes are not known, they
        take as long as the whole activation.
        """
        share = [1.0] * self.stages
        if self.held_bytes is not None:
            activation, left = (self.held_bytes[h] for h in (Held.ACTIVATION, Held.WEIGHT_INPUTS))
            share = [b / a if a else 1.0 for a, b in zip(activation, left, strict=True)]
        seconds = {}
        for figures, whole_kind, part_kind in (
            (to_host, Kind.OFFLOAD_F, Kind.OFFLOAD_I),
            (from_host, Kind.RELOAD_F, Kind.RELOAD_I),
        ):
            seconds[whole_kind] = tuple(figures)
            seconds[part_kind] = tuple(f * part for f, part in zip(figures, share, strict=True))
        return replace(self, host=HostCosts(seconds, ranks_per_link, duplex))

    def with_copies_of(self, other: Costs) -> Costs:
        """Return a copy of the costs whose host copies have the speed of ``other``'s."""
        if other.host is None or self.held_bytes is None or other.held_bytes is None:
            return replace(self, host=other.host)
        pairs = zip(
            self.held_bytes[Held.ACTIVATION], other.held_bytes[Held.ACTIVATION], strict=True
        )
        shares = [here / there if there else 0.0 for here, there in pairs]
        out, back = (
            [share * figure for share, figure in zip(shares, figures, strict=True)]
            for figures in (other.host.to_host, other.host.from_host)
        )
        return self.with_host(out, back, other.host.ranks_per_link, other.host.duplex)

    def with_vocabulary(self, vocabulary: VocabularyCosts) -> Costs:
        """Return the layers' costs with an embedding (first stage) and output layer (last
        stage)."""
        assert self.vocabulary is None
        return replace(self._at_the_ends(vocabulary, +1), vocabulary=vocabulary)

    def without_vocabulary(self) -> Costs:
        """Return the costs of the layers only, without the embedding and the output layer.

        If the part of the embedding and output layer is not known, the result still includes it.
        """
        if self.vocabulary is None:
            return self
        return replace(self._at_the_ends(self.vocabulary, -1), vocabulary=None)

    def _at_the_ends(self, vocabulary: VocabularyCosts, sign: int) -> Costs:
        def added(figures: tuple[float, ...], first: float, last: float) -> tuple[float, ...]:
            more = [0.0] * len(figures)
            more[0] += sign * first
            more[-1] += sign * last
            # Rounding may make the remaining time or memory of the first or last stage slightly
            # negative.
            return tuple(max(a + b, 0.0) for a, b in zip(figures, more, strict=True))

        held = self.held_bytes
        if held is not None:
            of_last = {
                Held.ACTIVATION: vocabulary.logits_bytes,
                Held.WEIGHT_INPUTS: vocabulary.deferred_bytes,
            }
            held = {what: added(figures, 0.0, of_last[what]) for what, figures in held.items()}
        ends = vocabulary.of_ends.items()
        seconds = {kind: added(self.seconds[kind], *end) for kind, end in ends}
        recompute = self.passes.recompute
        recompute = recompute and added(recompute, *vocabulary.of_ends[Kind.FORWARD])
        changed = self.with_passes(seconds=seconds, held_bytes=held, recompute=recompute)
        fixed = dict(self.slices.fixed)
        for kind, end in vocabulary.fixed_of_ends.items():
            if kind in fixed or any(end):
                fixed[kind] = added(fixed.get(kind, (0.0,) * self.stages), *end)
        return changed.with_slices(fixed=fixed) if fixed else changed


def _scaled(
    figures: Mapping[Kind, tuple[float, ...]], to: Costs, of: Costs
) -> dict[Kind, tuple[float, ...]]:
    """Return ``figures``, a part of the costs ``of`` by kind of pass and stage, scaled to the costs
    ``to``.

    Each figure is multiplied by the ratio of the two costs' seconds.
    """
    return {
        kind: _in_ratio(of_stages, to.seconds[kind], of.seconds[kind])
        for kind, of_stages in figures.items()
    }


def _in_ratio(
    figures: Iterable[float], given: Iterable[float], estimated: Iterable[float]
) -> tuple[float, ...]:
    """Return each of ``figures`` times the ratio of its ``given`` to its ``estimated`` value."""
    return tuple(
        figure * here / there if there else 0.0
        for figure, here, there in zip(figures, given, estimated, strict=True)
    )


def _part_of_p2p_seconds(p2p_seconds: float, latency: float, part: int) -> float:
    latency = min(latency, p2p_seconds)
    return latency + (p2p_seconds - latency) * token_share(part)


def uniform(
    placement: Placement, f: float, i: float, w: float, comm: float = 0.0, origin: str = "given"
) -> Costs:
    """Return costs that are equal for all ranks.

    The forward pass, input gradient and weight gradient of a microbatch on a whole rank take ``f``,
    ``i`` and ``w`` seconds, and a message ``comm`` seconds.
    """
    of_rank = {Kind.FORWARD: f, Kind.BACKWARD_INPUT: i, Kind.BACKWARD_WEIGHT: w}
    seconds = {
        kind: (figure / placement.chunks,) * placement.stages for kind, figure in of_rank.items()
    }
    return Costs(PassCosts(seconds), LinkCosts(comm), origin=origin)
