"""Measured milliseconds of single passes on A100s, and the estimate's for the same stages.

Steps hide errors of passes that cancel. measured.csv has the zero-bubble paper's profiled times,
and those of the artifact of vocabulary parallelism (its rows with 2,048 tokens): of each list of
eight ranks the median of the inner six.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import Model
from megatron_ext.planner.layouts.layout import evenly
from megatron_ext.schedule.action import Kind
from scripts.evaluation.measured import MEASURED, PASSES

_RANKS = 8
_METHODS = {
    "whole": "vocabulary on the ends",  # plain words: a value of the published rows
    "vocabulary 1": "vocabulary divided, collectives overlap",
    "vocabulary 2": "vocabulary divided, collectives overlap",
    "interlaced, not overlapped": "vocabulary divided, collectives wait",
}


@dataclass(frozen=True)
class PublishedStage:
    """Published milliseconds of the passes of an inner stage.

    Attributes:
        method: treatment of the vocabulary; "whole" has it on the first and the last stage.
        passes: milliseconds by name: F, I, W, B, the output layer's share of a rank, a message.
        in_view: whether a constant of the estimate was taken from them.
    """

    source: str
    method: str
    layers: int
    model: Model
    execution: Execution
    passes: Mapping[str, float]
    in_view: bool


_PASSES = {
    "forward_ms": "F",
    "input_gradient_ms": "I",
    "weight_gradient_ms": "W",
    "backward_ms": "B",
    "output_layer_ms": "output layer",
    "message_ms": "message",
}


def read_stages(path: Path = MEASURED) -> list[PublishedStage]:
    """Return the rows of the CSV file ``path`` that have times of passes."""
    with path.open(newline="") as file:
        return [_stage(row) for row in csv.DictReader(file) if row["job"].startswith(PASSES)]


def _stage(row: Mapping[str, str]) -> PublishedStage:
    # plain words: columns of the published rows
    hidden_size, heads, sequence = (int(row[name]) for name in ("hidden", "heads", "seq"))
    layers = int(row["layers"])
    model = Model(
        layers=("*-",) * (layers * _RANKS),
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden_size // heads,
        ffn_hidden_size=4 * hidden_size,
        vocabulary=int(row["vocab"]),
        untie_embeddings_and_output_weights=True,
        add_bias_linear=True,
        is_rotary=False,
        max_position_embeddings=sequence,
    )
    # The zero-bubble paper's runs write the attention matrix to memory, and use dropout.
    has_matrix = bool(row["weight_gradient_ms"])
    dropout = 0.1 if has_matrix else 0.0
    execution = Execution(
        sequence,
        micro_batch=int(row["mbs"]),
        sequence_parallel=False,
        transformer_engine=False,
        local_flash_attention=not has_matrix,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    passes = {name: float(row[column]) for column, name in _PASSES.items() if row[column]}
    return PublishedStage(
        row["source"],
        row["job"].removeprefix(PASSES),
        layers,
        model,
        execution,
        passes,
        row["in_view"] == "1",
    )


def predicted_passes(stage: PublishedStage) -> dict[str, float]:
    """Return the estimated milliseconds of those passes of ``stage`` that were measured."""
    stages = evenly(len(stage.model.layers), _RANKS).of(stage.model)
    costs = estimate(stage.model, stages, stage.execution, GPUS["a100"].rates())
    seconds = {kind.value: figures[1] for kind, figures in costs.seconds.items()}
    seconds["B"] = seconds[Kind.BACKWARD_INPUT.value] + seconds[Kind.BACKWARD_WEIGHT.value]
    assert costs.vocabulary is not None
    seconds["output layer"] = sum(costs.vocabulary.output_layer) / _RANKS
    return {name: 1e3 * seconds[name] for name in stage.passes if name in seconds}


def ratios_by_pass(stages: Sequence[PublishedStage]) -> Mapping[tuple[str, str], list[float]]:
    """Return the predicted milliseconds divided by the measured ones, by the source's treatment of
    the vocabulary and by the pass."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for stage in stages:
        name = "zero bubble" if "W" in stage.passes else _METHODS[stage.method]
        for pass_, predicted in predicted_passes(stage).items():
            ratios[name, pass_].append(predicted / stage.passes[pass_])
    return ratios
