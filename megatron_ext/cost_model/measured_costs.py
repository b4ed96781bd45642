"""Costs from the passes that the ranks of a training have measured under some schedule.

Passes are measured as the schedule runs them: an output layer's weight gradient may be in I
(`head`), I and W may be one pass B, and the vocabulary may be partitioned. These passes are split
into their parts here, in the proportions of the estimate if the passes alone do not determine the
parts.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ext.compile.output_layer import costs_in
from megatron_ext.compile.program.verify import Program
from megatron_ext.cost_model.measured.places import RankPlaces
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts, VocabularyCosts
from megatron_ext.schedule.kinds import RULES, Held
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.schedule.timeline import Event

_Passes = Mapping[tuple[int, Kind], float]  # seconds of passes by stage and kind

_OF_STAGES = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class RankFigures:
    """Measurements of one rank in a training: seconds of its passes and messages, and bytes.

    Attributes:
        seconds: seconds of its passes, by stage and kind.
        held: bytes that a microbatch holds, by stage and kind of memory, as far as known.
        p2p_seconds: seconds of a message, for each neighbour that this rank has exchanged messages
            with.
        neighbours: global ranks of these neighbours, in the same order.
        host: the name of its node.
        reserved: bytes that its allocator has reserved beyond the most that was allocated; None: it
            has no such allocator.
        forwards: seconds of the forward passes of the first stage in the last step, by microbatch;
            () on ranks without that stage.
        places: seconds of its passes by the microbatch's place in the step; None if microbatches
            are not ordered.
    """

    seconds: _Passes
    held: Mapping[tuple[int, Held], float]
    p2p_seconds: Sequence[float]
    neighbours: Sequence[int] = ()
    host: str = ""
    reserved: float | None = None
    forwards: tuple[float, ...] = ()
    places: RankPlaces | None = None


@dataclass(frozen=True)
class Machine:
    """Measurements of a training's ranks other than their passes: links and memory.

    Attributes:
        links: mean seconds of a message, by whether it goes from node to node.
        ranks_of_node: the largest number of ranks on one node.
        reserved: the largest `RankFigures.reserved` of all ranks.
    """

    links: Mapping[bool, float]
    ranks_of_node: int
    reserved: float | None

    @classmethod
    def of(cls, ranks: Sequence[RankFigures]) -> Machine:
        """Return the links and memory that ``ranks``, all ranks of a training in order, have
        measured."""
        by_kind: dict[bool, list[float]] = defaultdict(list)
        for rank in ranks:
            for seconds, neighbour in zip(rank.p2p_seconds, rank.neighbours, strict=True):
                by_kind[ranks[neighbour].host != rank.host].append(seconds)
        return cls(
            {is_far: statistics.fmean(group) for is_far, group in sorted(by_kind.items())},
            max(Counter(rank.host for rank in ranks).values()),
            max((rank.reserved for rank in ranks if rank.reserved is not None), default=None),
        )


def medians(events: Iterable[Event]) -> dict[tuple[int, Kind], float]:
    """Return the median seconds of passes in the recorded ``events``, by stage and kind."""
    groups = defaultdict(list)
    for event in events:
        groups[event.action.stage, event.action.kind].append(event.end - event.start)
    return {key: statistics.median(group) for key, group in groups.items()}


def forwards_of_first_stage(events: Iterable[Event]) -> tuple[float, ...]:
    """Return the seconds of the first stage's forward passes among recorded ``events``.

    They are in the order of microbatches.
    """
    forwards = [e for e in events if (e.action.stage, e.action.kind) == (0, Kind.FORWARD)]
    forwards.sort(key=lambda event: event.action.microbatch)
    return tuple(event.end - event.start for event in forwards)


def measured_costs(
    program: Program, estimate: Costs, ranks: Sequence[RankFigures], measured: str
) -> Costs:
    """Return the costs that all ``ranks`` of a training have measured while running ``program``.

    With tensor or data parallelism several ranks have a stage. The median of their seconds counts,
    and the maximum of their bytes. For messages the mean over all neighbours counts, since a
    microbatch passes all of them.

    Args:
        estimate: costs with which ``program`` was made. These costs split passes that contain
            several parts.
        measured: time and place of the measurement, for people to read.
    """
    passes = _over_ranks([rank.seconds for rank in ranks], statistics.median)
    held = _over_ranks([rank.held for rank in ranks], max)
    of_neighbours = [seconds for rank in ranks for seconds in rank.p2p_seconds]
    p2p_seconds = statistics.mean(of_neighbours) if of_neighbours else 0.0
    in_passes = costs_in(program, estimate)
    seconds = {
        kind: tuple(_seconds(kind, stage, passes, in_passes) for stage in range(estimate.stages))
        for kind in in_passes.seconds
    }
    costs = Costs(
        PassCosts(
            {kind: seconds[kind] for kind in _OF_STAGES},
            held_bytes=_held_bytes(held, in_passes),
            recompute=_recompute_seconds(passes, seconds[Kind.FORWARD]),
        ),
        LinkCosts(p2p_seconds, latency=min(estimate.links.latency, p2p_seconds)),
        slices=estimate.slices,
        origin=f"measured: {measured}",
    )
    costs = costs.with_copies_of(estimate)
    if estimate.vocabulary is None:
        return costs
    if program.problem.options.vocab_parallel is not VocabularyParallel.NONE:
        return costs.with_vocabulary(_of_shards(seconds, program, estimate.vocabulary))
    costs = replace(costs, vocabulary=_scaled(in_passes, costs))
    costs = _with_weight_gradient_in_w(costs, in_passes, estimate)
    assert costs.vocabulary is not None
    vocabulary = replace(
        costs.vocabulary,
        fixed_output_layer=estimate.vocabulary.fixed_output_layer,
        fixed_embedding=estimate.vocabulary.fixed_embedding,
    )
    costs = replace(costs, vocabulary=vocabulary)
    origin = f"{costs.origin}; output layer and embedding in estimated proportions"
    return replace(costs, origin=origin)


def _over_ranks[Key](
    figures: Iterable[Mapping[Key, float]], pick: Callable[[list[float]], float]
) -> dict[Key, float]:
    groups: dict[Key, list[float]] = defaultdict(list)
    for rank in figures:
        for key, figure in rank.items():
            groups[key].append(figure)
    return {key: pick(group) for key, group in groups.items()}


def _seconds(kind: Kind, stage: int, passes: _Passes, in_passes: Costs) -> float:
    """Return the seconds of one ``kind`` of pass on ``stage``, from the measured passes.

    W is taken from the measured pass W, or from B if W was not measured. A pass such as B does
    several kinds of work; ``kind`` gets its estimated share of the seconds.
    """
    doing = [other for at, other in passes if at == stage and kind in RULES[other].covers]
    if not doing:
        return 0.0
    shortest = min(doing, key=lambda other: len(RULES[other].covers))
    parts = {part: in_passes.seconds[part][stage] for part in RULES[shortest].covers}
    total = sum(parts.values())
    share = parts[kind] / total if total else 1 / len(parts)
    return passes[stage, shortest] * share


def _recompute_seconds(passes: _Passes, forward: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of R (recomputation) on each stage; () if no stage measured any.

    On a stage without a measured R they are the seconds of F.
    """
    if not any(kind is Kind.RECOMPUTE for _, kind in passes):
        return ()
    return tuple(passes.get((stage, Kind.RECOMPUTE), f) for stage, f in enumerate(forward))


def _held_bytes(
    held: Mapping[tuple[int, Held], float], in_passes: Costs
) -> dict[Held, tuple[float, ...]] | None:
    """Return the measured bytes by kind of memory and stage; None if they were not measured.

    Bytes for W that were not measured, because the schedule had no W, are in the estimate's
    proportion to the activations.
    """
    stages = range(in_passes.stages)
    if any((stage, Held.ACTIVATION) not in held for stage in stages):
        return None
    activation = tuple(held[stage, Held.ACTIVATION] for stage in stages)
    estimated = in_passes.held_bytes
    ratio = [0.0] * len(stages)
    if estimated is not None:
        pairs = zip(estimated[Held.WEIGHT_INPUTS], estimated[Held.ACTIVATION], strict=True)
        ratio = [inputs / all_of_it if all_of_it else 0.0 for inputs, all_of_it in pairs]
    inputs = tuple(
        held.get((stage, Held.WEIGHT_INPUTS), activation[stage] * ratio[stage]) for stage in stages
    )
    return {Held.ACTIVATION: activation, Held.WEIGHT_INPUTS: inputs}


def _scaled(in_passes: Costs, costs: Costs) -> VocabularyCosts:
    """Return the costs of embedding and output layer, as parts of the measured ``costs`` of passes.

    Each part has the share of its pass that it has in ``in_passes``, the estimate.
    """
    assert in_passes.vocabulary is not None
    ends = in_passes.vocabulary.of_ends

    def part(kind: Kind, end: int) -> float:  # end: first (0) or last (-1) stage
        total = in_passes.seconds[kind][end]
        share = ends[kind][end] / total if total else 0.0
        return share * costs.seconds[kind][end]

    forward, input_gradient, weight_gradient = _OF_STAGES
    return VocabularyCosts(
        (part(forward, -1), part(input_gradient, -1), part(weight_gradient, -1)),
        (part(forward, 0), part(weight_gradient, 0)),
        in_passes.vocabulary.logits_bytes,
        in_passes.vocabulary.deferred_bytes,
    )


def _with_weight_gradient_in_w(costs: Costs, in_passes: Costs, estimate: Costs) -> Costs:
    """Return ``costs`` with the output layer's weight gradient counted in W, even if measured
    in I."""
    assert costs.vocabulary and in_passes.vocabulary and estimate.vocabulary
    _, _, weight_gradient = estimate.vocabulary.output_layer
    _, in_input_gradient, in_weight_gradient = in_passes.vocabulary.output_layer
    if in_weight_gradient or not weight_gradient:
        return costs
    forward, input_gradient, _ = costs.vocabulary.output_layer
    moved = input_gradient * weight_gradient / in_input_gradient
    seconds = dict(costs.seconds)
    for kind, more in ((Kind.BACKWARD_INPUT, -moved), (Kind.BACKWARD_WEIGHT, moved)):
        seconds[kind] = (*seconds[kind][:-1], seconds[kind][-1] + more)
    held = costs.held_bytes
    deferred = estimate.vocabulary.deferred_bytes
    if held is not None:
        *others, last = held[Held.WEIGHT_INPUTS]
        held = {**held, Held.WEIGHT_INPUTS: (*others, last + deferred)}
    output_layer = (forward, input_gradient - moved, moved)
    return replace(
        costs.with_passes(seconds=seconds, held_bytes=held),
        vocabulary=replace(costs.vocabulary, output_layer=output_layer, deferred_bytes=deferred),
    )


def _of_shards(
    seconds: Mapping[Kind, Sequence[float]], program: Program, estimate: VocabularyCosts
) -> VocabularyCosts:
    """Return the costs of embedding and output layer, summed over the shards of all ranks."""
    totals = {kind: sum(figures) for kind, figures in seconds.items()}
    forward, input_gradient = totals[Kind.LOGITS], totals[Kind.LOGITS_INPUT]
    # With method 2 one pass computes the logits and the input gradient.
    if program.problem.options.vocab_parallel is VocabularyParallel.TWO:
        both = forward + input_gradient
        forward = both * estimate.output_layer[0] / (sum(estimate.output_layer[:2]) or 1.0)
        input_gradient = both - forward
    return VocabularyCosts(
        (forward, input_gradient, totals[Kind.LOGITS_WEIGHT]),
        (totals[Kind.EMBEDDING], totals[Kind.EMBEDDING_WEIGHT]),
        estimate.logits_bytes,
        estimate.deferred_bytes,
    )
