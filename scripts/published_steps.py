"""Predicted over published seconds of a step of dense models, as their papers trained them.

    python -m scripts.published_steps

The figures of Korthikanti et al. (2022, arXiv:2205.05198, table 5), the Llama 3 paper (2024,
arXiv:2407.21783, table 4) and the Nemotron-4 340B report (2024, arXiv:2406.11704, table 2). None of
these has been used to choose a constant of the estimate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model_memory import TrainingState, default_bucket
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import evaluate

_GPT3 = "heads={heads},layers={layers},hidden={hidden},sequence=2048,vocabulary=51200,tied=true"
_LLAMA = (
    "layers=126,hidden=16384,heads=128,kv-heads=8,ffn=53248,gated=true,sequence=8192,"
    "vocabulary=128256"
)
_NEMOTRON = "layers=96,hidden=18432,heads=96,kv-heads=8,ffn=73728,sequence=4096,vocabulary=256000"
# Before flash attention, whose matrix these trainings recomputed, and with dropout.
_SELECTIVE = {"transformer_engine": False, "recompute_modules": frozenset({"core_attn"})}
_WITHOUT_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Llama's virtual stages are not published: four on each rank are assumed.
_LLAMA_LAYERS = (1, *[2] * 62, 1)


@dataclass(frozen=True)
class Training:
    """A published training with 8 tensor-parallel ranks and microbatches of one sample.

    Attributes:
        model: text for `parse_model`.
        layers: layers of each stage.
        batch: samples of a step.
        seconds: published seconds of a step.
    """

    name: str
    model: str
    execution: Mapping[str, Any]
    gpu: str
    gpus: int
    pipeline: int
    layers: tuple[int, ...]
    batch: int
    seconds: float


def _llama_seconds(gpus: int, batch: int, flops: float) -> float:
    """Return the seconds of a step of Llama 3 405B that reaches ``flops`` a second on each GPU.

    A token takes 6 operations for each parameter, and those of causal attention.
    """
    tokens = batch * 8192
    a_token = 6 * 405.9e9 + 6 * 126 * 16384 * 8192
    return a_token * tokens / gpus / flops


def _gpt3(layers: int, hidden: int, heads: int) -> str:
    return _GPT3.format(layers=layers, hidden=hidden, heads=heads)


TRAININGS = (
    Training("GPT 175B", _gpt3(96, 12288, 96), _SELECTIVE, "a100", 64, 8, (4,) * 24, 64, 13.75),
    Training(
        "GPT 530B", _gpt3(105, 20480, 128), _SELECTIVE, "a100", 280, 35, (1,) * 105, 280, 37.83
    ),
    Training("GPT 1T", _gpt3(128, 25600, 160), _SELECTIVE, "a100", 512, 64, (2,) * 64, 512, 71.49),
    *(
        Training(
            "Llama 3 405B",
            _LLAMA,
            _WITHOUT_DROPOUT,
            "h100",
            gpus,
            16,
            _LLAMA_LAYERS,
            2048,
            _llama_seconds(gpus, 2048, flops),
        )
        for gpus, flops in ((8192, 430e12), (16384, 400e12))
    ),
    *(
        Training(
            "Nemotron-4 340B", _NEMOTRON, _WITHOUT_DROPOUT, "h100", gpus, 12, (1,) * 96, batch, s
        )
        for gpus, batch, s in ((1536, 768, 10.3), (6144, 2304, 8.0))
    ),
)


def predicted_seconds(training: Training) -> float:
    """Return the estimated seconds of a step of ``training`` under Megatron's own schedule."""
    described = parse_model(training.model)
    model = described.model
    if "tied=true" in training.model:
        model = replace(
            model,
            normalization="LayerNorm",
            add_bias_linear=True,
            is_rotary=False,
            max_position_embeddings=2048,
        )
    execution = replace(
        described.execution(tensor_parallel=8),
        pipeline_span=training.gpus,
        **training.execution,
    )
    copies = training.gpus // (8 * training.pipeline)
    state = TrainingState(
        distributed=True,
        data_parallel=copies,
        expert_data_parallel=copies,
        bucket=default_bucket(copies),  # all of them overlap reductions, or have one copy
    )
    chunks = len(training.layers) // training.pipeline
    work = estimated_work(
        model,
        execution,
        state,
        GPUS[training.gpu].rates(execution.precision),
        ranks=training.pipeline,
        microbatches=training.batch // copies,
    )
    spec = f"interleaved:vpp={chunks}" if chunks > 1 else "1f1b"
    return evaluate(work, spec, Layout(training.layers), search=False).seconds


def main() -> None:
    ratios = []
    for training in TRAININGS:
        seconds = predicted_seconds(training)
        ratios.append(seconds / training.seconds)
        print(
            f"{ratios[-1]:5.2f} {seconds:6.2f} {training.seconds:6.2f} s  {training.name} on "
            f"{training.gpus} {training.gpu.upper()}"
        )
    print(f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
