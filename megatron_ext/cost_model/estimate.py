"""Costs estimated from a model's description, if no measured ones exist.

The work of a model is counted operation by operation (`operations`), and `Rates` turn it into
seconds. The bytes that a pass stores are counted in activations.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from megatron_ext.cost_model.activations import held_of_stage, keys_values_of_stage
from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.messages.paired_layers import hidden_by_pairs
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.operation import Group
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.stage_seconds import (
    PassSeconds,
    seconds_of_embedding,
    seconds_of_layers,
    seconds_of_output_layer,
)
from megatron_ext.cost_model.tower_costs import tower_costs
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import (
    Costs,
    LinkCosts,
    OverlapCosts,
    PassCosts,
    SliceCosts,
    VocabularyCosts,
)
from megatron_ext.schedule.kinds import RULES, Held


def estimate(
    model: Model, stages: Sequence[Stage], execution: Execution, rates: Rates, slices: int = 1
) -> Costs:
    """Return the estimated seconds and bytes of a microbatch on each of ``stages``.

    The embedding and the vision tower have to be on the first stage, the output layer on the last.

    Args:
        rates: speeds of the GPU and its links.
        slices: number of slices of a sequence, for `SliceCosts.fixed`: a mean slice takes the time
            that is estimated for its tokens.
    """
    costs = _of_microbatch(model, stages, execution, rates)
    if slices == 1:
        return costs
    mean = _of_microbatch(model, stages, replace(execution, slices=slices), rates)
    return _with_fixed(costs, mean, slices)


def _with_fixed(costs: Costs, mean: Costs, slices: int) -> Costs:
    """Return ``costs`` with the fixed seconds of each pass, which a slice of any length takes.

    A share x of a sequence takes ``fixed + (costs - fixed) * x``, and a mean slice takes ``mean``.
    """

    def fixed(figures: Sequence[float], of_mean: Sequence[float]) -> tuple[float, ...]:
        return tuple(
            max(of_slice - seconds / slices, 0.0) / (1 - 1 / slices)
            for of_slice, seconds in zip(of_mean, figures, strict=True)
        )

    model, mean_slice = costs.without_tower(), mean.without_tower()
    assert model.vocabulary is not None and mean_slice.vocabulary is not None
    ends, ends_of_slice = model.vocabulary, mean_slice.vocabulary
    forward, input_gradient, weight_gradient = fixed(ends.output_layer, ends_of_slice.output_layer)
    lookup, table_gradient = fixed(ends.embedding, ends_of_slice.embedding)
    vocabulary = replace(
        ends,
        fixed_output_layer=(forward, input_gradient, weight_gradient),
        fixed_embedding=(lookup, table_gradient),
    )
    passes = {
        kind: fixed(figures, mean_slice.seconds[kind]) for kind, figures in model.seconds.items()
    }
    return replace(costs.with_slices(fixed=passes), vocabulary=vocabulary)


def _of_microbatch(
    model: Model, stages: Sequence[Stage], execution: Execution, rates: Rates
) -> Costs:
    layers = [seconds_of_layers(model, stage, execution, rates) for stage in stages]
    forward, input_gradient, weight_gradient = zip(*(stage.totals for stage in layers), strict=True)
    message = message_bytes(model, execution)
    speed, latency = _to_neighbour(execution, rates)
    measured = rates.measured
    held = [held_of_stage(model, stage, execution, measured) for stage in stages]
    kept, left = zip(*held, strict=True)
    costs = Costs(
        PassCosts(
            {
                Kind.FORWARD: forward,
                Kind.BACKWARD_INPUT: input_gradient,
                Kind.BACKWARD_WEIGHT: weight_gradient,
            },
            held_bytes={Held.ACTIVATION: kept, Held.WEIGHT_INPUTS: left},
        ),
        _links(stages, message, speed, latency),
        slices=SliceCosts(
            attention=tuple(map(_attention_share, layers)),
            keys_values=tuple(keys_values_of_stage(model, stage, execution) for stage in stages),
        ),
        overlap=OverlapCosts(
            hidden_by_pairs(model, stages, execution, rates) if execution.overlap else {}
        ),
        origin="estimated from the model's dimensions" if measured is None else measured.origin,
        no_estimate=(model.why_no_estimate or "") if measured is None else "",
    )
    # Measured seconds of passes contain what ranks waited for tensor-parallel exchanges, so no part
    # of the exchanges is subtracted.
    hides = execution.framework is Framework.MEGATRON and measured is None
    if hides and any(stage.forward.get(Group.TENSOR) for stage in layers):
        costs = _with_hidden_exchanges(costs, layers, execution)
    costs = costs.with_vocabulary(_vocabulary(model, stages[-1], execution, rates))
    tower = None if measured is None else measured.tower
    if tower is None and model.tower is not None:
        tower = tower_costs(model.tower, execution, rates)
    if tower is not None:
        costs = costs.with_tower(tower)
    assert costs.held_bytes is not None
    copies = [figure / rates.host for figure in costs.held_bytes[Held.ACTIVATION]]
    return costs.with_host(copies, copies)


# Shares by which the forward pass, and the backward pass, of Megatron's layers take longer while
# collectives of vocabulary parallelism run. They come from stage times of the method's authors on
# eight A100s (6.5 to 8.9 % and 4.6 to 7.2 %: rows 578 to 593 of measured.csv in
# scripts/evaluation). Other GPUs are assumed to have the same shares.
CONTENTION = 0.077, 0.060
# Bytes of a logit that a shard reads and writes to correct its softmax by the sums of other shards
# (megatron/core/tensor_parallel/vocab_output.py of the same authors).
_RESCALED = 8


def message_bytes(model: Model, execution: Execution) -> float:
    """Return the bytes of a message of hidden states between two stages, for one microbatch."""
    return execution.split_tokens * model.hidden_size * execution.element_bytes


def _attention_share(stage: PassSeconds) -> float:
    """Return the share of a stage's compute that grows with the square of the sequence.

    F, I and W count together.
    """
    return sum(stage.squared) / (sum(stage.totals) or 1.0)


def _links(stages: Sequence[Stage], message: float, speed: float, latency: float) -> LinkCosts:
    """Return the costs of messages between stages, which have ``message`` bytes for a hidden state.

    Behind multi-token prediction, messages have the hidden states of its depths too.
    """
    of_one = message / speed
    links = LinkCosts(of_one, message_bytes=message, latency=min(latency, of_one))
    states = tuple(1 + depths for depths in accumulate(stage.depths for stage in stages[:-1]))
    if set(states) <= {1}:
        return links
    by_stage = tuple(number * of_one for number in states)
    return replace(
        links,
        p2p_seconds=statistics.fmean(by_stage),
        p2p_seconds_by_stage=by_stage,
        latencies=tuple(min(latency, seconds) for seconds in by_stage),
        states=states,
    )


def _to_neighbour(execution: Execution, rates: Rates) -> tuple[float, float]:
    """Return the speed of messages from one pipeline rank to the next, and their latency.

    The speed is in bytes per second, the latency in seconds.
    """
    is_near = 0 < execution.pipeline_span <= rates.domain
    near, far = zip(rates.to_neighbours, rates.latencies, strict=True)
    return near if is_near else far


def _vocabulary(model: Model, last: Stage, execution: Execution, rates: Rates) -> VocabularyCosts:
    """Return the costs of the embedding and of all runs of the output layer for a microbatch.

    Multi-token prediction runs the output layer several times.
    """
    if not model.vocabulary:
        return VocabularyCosts()
    run = seconds_of_output_layer(model, execution, rates)
    runs = last.output_runs
    forward, input_gradient, weight_gradient = (runs * figure for figure in run.totals)
    logits = runs * execution.tokens * model.vocabulary / execution.ranks_of_loss
    inputs = runs * execution.split_tokens * model.hidden_size
    return VocabularyCosts(
        output_layer=(forward, input_gradient, weight_gradient),
        embedding=seconds_of_embedding(model, execution, rates),
        logits_bytes=4 * logits,
        deferred_bytes=(inputs + logits) * execution.element_bytes,
        launch=rates.launch,
        rescaling=_RESCALED * logits / rates.memory,
        contention=CONTENTION,
    )


def _with_hidden_exchanges(
    costs: Costs, layers: Sequence[PassSeconds], execution: Execution
) -> Costs:
    """Return ``costs`` without the time of tensor-parallel collectives that other work overlaps.

    In F, a pair of matrices gathers before the first and scatters after the second, or it
    all-reduces, which takes as long as both; in I it gathers before the second and scatters after
    the first. In W, the repeated gathers overlap the product before them. In a whole B, and in an I
    directly followed by its W, the weight gradients of second matrices overlap the reductions of I.
    """
    exchanges = [stage.forward.get(Group.TENSOR, 0.0) for stage in layers]
    seconds = dict(costs.seconds)
    if execution.sequence_parallel:
        products = seconds[Kind.BACKWARD_WEIGHT]
        gathers = [len(execution.gathered_for_w) * e / 2 for e in exchanges]
        seconds[Kind.BACKWARD_WEIGHT] = tuple(map(max, products, gathers))
    reductions = [e / 2 if execution.sequence_parallel else e for e in exchanges]
    rows = [stage.rows for stage in layers]
    return costs.with_passes(
        seconds=seconds, fused_backward_saving=tuple(map(min, reductions, rows))
    )


def waiting_shares(
    model: Model, execution: Execution, rates: Rates
) -> dict[Group, dict[str, float]]:
    """Return the share of the time of all layers' F, I, W and B in which ranks wait for other
    ranks.

    The shares are by group of the ranks (tensor, expert or other) and by kind of pass. Groups
    without any waiting are absent.
    """
    stage = Stage(model.layers, depths=model.mtp_num_layers)
    costs = estimate(model, [stage], execution, rates).without_vocabulary()
    layers = seconds_of_layers(model, stage, execution, rates)
    totals = {kind: figures[0] for kind, figures in costs.seconds.items()}
    terms = dict(
        zip(totals, (layers.forward, layers.input_gradient, layers.weight_gradient), strict=True)
    )
    covered = RULES[Kind.FULL_BACKWARD].covers
    shares: dict[Group, dict[str, float]] = {}
    for group in Group:
        waited = {kind: seconds.get(group, 0.0) for kind, seconds in terms.items()}
        if not any(waited.values()):
            continue
        saving = costs.fused_backward_saving_on(0) if group is Group.TENSOR else 0.0
        both = sum(waited[kind] for kind in covered) - saving
        of_both = sum(totals[kind] for kind in covered) - costs.fused_backward_saving_on(0)
        shares[group] = {
            kind.value: waited[kind] / totals[kind] if totals[kind] else 0.0 for kind in totals
        } | {Kind.FULL_BACKWARD.value: both / of_both}
    return shares
