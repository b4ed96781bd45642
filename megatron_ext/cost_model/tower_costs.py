"""Seconds, bytes and parameters of a vision tower, estimated from its sizes.

A tower counts as Megatron runs it: whole on each context-parallel rank, partitioned over
tensor-parallel ranks without sequence parallelism, and without recompute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_ext.cost_model.activations import held_of_stage
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.measured.scale import PASS
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.operation import Operation, linear
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.stage_seconds import seconds_by_component
from megatron_ext.cost_model.tower import Tower, TowerTraining
from megatron_ext.schedule.costs import TowerCosts


def tower_costs(tower: Tower, execution: Execution, rates: Rates) -> TowerCosts:
    """Return the seconds of F, I and W of a microbatch in a vision tower, and the bytes it stores.

    Frozen layers have neither I nor W and store nothing.
    """
    run = tower_execution(tower, execution)
    # Measured rates are not used for the tower, as they were measured with the language model's
    # layers.
    rates = replace(rates, measured=None)
    model, trained = tower_layers(tower), tower.trained
    totals = [0.0, 0.0, 0.0]
    for name, seconds in seconds_by_component(model, Stage(model.layers), run, rates):
        # The tower runs within the first stage's pass, so it adds no overhead of a pass.
        if name != PASS:
            of_layer = seconds.totals if trained is TowerTraining.ALL else (seconds.totals[0], 0, 0)
            totals = [total + more for total, more in zip(totals, of_layer, strict=True)]
    first, last = _projector(tower, run)
    for operation in (first, last):
        forward, backward, weights = rates.seconds_of(operation)
        if trained is TowerTraining.NOTHING:
            backward = weights = 0.0
        elif trained is TowerTraining.PROJECTOR and operation is first:
            # No layer before the projector is trained, so it computes no input gradient.
            backward = 0.0
        for at, more in enumerate((forward, backward, weights)):
            totals[at] += tower.projectors * more
    held = 0.0
    if trained is TowerTraining.ALL:
        held, _ = held_of_stage(model, Stage(model.layers), run)
    if trained is not TowerTraining.NOTHING:
        # Sum of the widths of the inputs of the projector's two matrices, which are equally wide.
        width = 2 * tower.merged * tower.hidden_size
        held += tower.projectors * _joined_tokens(tower, run) * width * run.element_bytes
    return TowerCosts((totals[0], totals[1], totals[2]), held)


def tower_layers(tower: Tower) -> Model:
    """Return the transformer layers of a vision tower, described as a model."""
    return Model(
        layers=("*-",) * tower.layers,
        hidden_size=tower.hidden_size,
        num_attention_heads=tower.num_attention_heads,
        num_query_groups=tower.num_query_groups,
        kv_channels=tower.hidden_size // tower.num_attention_heads,
        ffn_hidden_size=tower.ffn_hidden_size,
        vocabulary=0,
        gated_linear_unit=tower.gated_linear_unit,
        add_bias_linear=True,
        is_rotary=False,
        is_causal=False,
    )


def tower_execution(tower: Tower, execution: Execution) -> Execution:
    """Return how the images of a microbatch run through a vision tower."""
    return replace(
        execution,
        sequence=tower.patches_of_image,
        micro_batch=execution.micro_batch * tower.images,
        context_parallel=1,
        sequence_parallel=False,
        recompute=False,
        recompute_modules=frozenset(),
        captured=frozenset(),
        userbuffers=frozenset(),
        unkept=frozenset(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        is_frozen=False,
        overlap=0.0,
    )


def tower_matrices(tower: Tower) -> Iterator[tuple[int, int, bool]]:
    """Yield the parameters of a vision tower's layers, then those of its projectors.

    Each entry has the elements of matrices, those of other parameters, both on all tensor-parallel
    ranks together, and whether they are trained.
    """
    hidden_size, width = tower.hidden_size, tower.merged * tower.hidden_size
    groups = tower.num_query_groups / tower.num_attention_heads
    attention = int(hidden_size * hidden_size * (2 + 2 * groups))
    mlp = (3 if tower.gated_linear_unit else 2) * hidden_size * tower.ffn_hidden_size
    others = int(hidden_size * (2 + 2 * groups)) + tower.ffn_hidden_size + 6 * hidden_size
    trained = tower.trained
    yield (
        tower.layers * (attention + mlp),
        tower.layers * others,
        trained is TowerTraining.ALL,
    )
    matrices = width * width + width * tower.output_size
    yield (
        tower.projectors * matrices,
        tower.projectors * (width + tower.output_size),
        trained is not TowerTraining.NOTHING,
    )


def _projector(tower: Tower, run: Execution) -> tuple[Operation, Operation]:
    """Return the two matrix products of a vision tower's projector.

    One is within the width of the joined patches, the other goes to the language model's width.
    """
    tokens, width = _joined_tokens(tower, run), tower.merged * tower.hidden_size
    local_width = width / run.tensor_parallel
    first, *_ = linear("projector's fc1", tokens, width, local_width, run)
    last, *_ = linear("projector's fc2", tokens, local_width, tower.output_size, run)
    return first, last


def _joined_tokens(tower: Tower, run: Execution) -> float:
    return run.tokens / tower.merged
