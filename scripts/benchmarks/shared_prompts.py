"""Estimated gain of prompts that are computed once, compared with packs of the same sequences.

    python -m scripts.benchmarks.shared_prompts

A dense 70B (Llama 3's sizes) on H100s, TP 8, four pipeline ranks, 1F1B: a step of 16 prompts with
eight answers each. Sequences are packed into 16,384 tokens, in order, and so are groups (a prompt
with its answers); a longer group is a microbatch of its own. Costs are estimated for each number of
tokens that occurs, and their attention is scaled to the pairs of tokens that attend to one another.
Gathered keys and values (in F, and again in I) and the sums of their gradients are counted as
memory traffic.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.unequal import UnequalSteps
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.problem import Problem
from scripts.benchmarks.harness import arguments, print_table

PACK, RANKS, TENSOR, ANSWERS, PROMPTS = 16384, 4, 8, 8, 16
MODEL = (
    "layers=80,hidden=8192,heads=64,kv-heads=8,ffn=28672,gated=true,vocabulary=128256,sequence={}"
)
# Cases: tokens of a prompt, tokens of an answer, and least expected gain.
CASES = ((1024, 1024, 1.6), (4096, 1024, 2.7), (6144, 512, 3.5), (256, 2048, 1.05))
_ELEMENT = 2  # bytes of a bf16 element
# Number of times that the bytes of an attended key and value are read or written. They are gathered
# in F and once more in I. In I their gradient is read, too, and an fp32 sum is read and written.
_MOVED_FORWARD, _MOVED_BACKWARD = 2, 2 + 1 + 2 * 2


@dataclass(frozen=True)
class Load:
    """Load of a microbatch.

    Attributes:
        tokens: number of tokens.
        pairs: number of pairs of tokens of which one attends to the other.
        gathered: number of tokens whose keys and values are gathered.
    """

    tokens: int
    pairs: float
    gathered: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.tokens + other.tokens, self.pairs + other.pairs, self.gathered + other.gathered
        )


def sequence(prompt: int, answer: int) -> Load:
    """Return the load of one prompt followed by one answer."""
    return Load(prompt + answer, (prompt + answer) ** 2 / 2)


def group(prompt: int, answer: int) -> Load:
    """Return the load of a prompt that is computed once, with all its answers."""
    prefix, rest = prompt - 1, answer + 1
    return Load(
        prefix + ANSWERS * rest,
        prefix**2 / 2 + ANSWERS * (prefix * rest + rest**2 / 2),
        prefix + ANSWERS * (prefix + rest),
    )


def packed(loads: Sequence[Load]) -> list[Load]:
    """Return microbatches that hold ``loads`` in their order.

    A microbatch has at most `PACK` tokens, or is a single load that has more.
    """
    made = [loads[0]]
    for load in loads[1:]:
        if made[-1].tokens + load.tokens <= PACK:
            made[-1] += load
        else:
            made.append(load)
    return made


@functools.cache
def costs_of(tokens: int) -> Costs:
    """Return the estimated costs of a microbatch that is one document of ``tokens`` tokens."""
    described = parse_model(MODEL.format(-(-tokens // TENSOR) * TENSOR))
    model = described.model
    stages = stages_of(model, model.evenly(RANKS))
    return estimate(model, stages, described.execution(TENSOR), GPUS["h100"].rates())


def step_seconds(microbatches: Sequence[Load]) -> float:
    """Return the seconds of a step with these ``microbatches`` under 1F1B."""
    resolved = choose("1f1b")
    placement = resolved.place(RANKS)
    base = costs_of(PACK)
    program = build_program(resolved, Problem(placement, len(microbatches), base))
    kinds = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    made = {
        kind: np.array([_seconds(load, kind) for load in microbatches]) / sum(base.seconds[kind])
        for kind in kinds
    }
    of_inputs, of_weights = (sum(base.seconds[kind]) for kind in kinds[1:])
    backward = of_inputs * made[Kind.BACKWARD_INPUT] + of_weights * made[Kind.BACKWARD_WEIGHT]
    made[Kind.FULL_BACKWARD] = backward / (of_inputs + of_weights)
    rows = np.arange(len(microbatches))[None]
    return UnequalSteps(program).makespan(made, rows)


def _seconds(load: Load, kind: Kind) -> float:
    """Return the seconds of a pass of ``load``, summed over all stages."""
    costs = costs_of(load.tokens)
    seconds = sum(costs.seconds[kind])
    if kind is Kind.BACKWARD_WEIGHT:
        return seconds
    attention = sum(costs.of_attention(kind, stage) for stage in range(costs.stages))
    described = parse_model(MODEL.format(PACK)).model
    width = 2 * described.key_value_width / TENSOR * _ELEMENT * len(described.layers)
    times = _MOVED_FORWARD if kind is Kind.FORWARD else _MOVED_BACKWARD
    moved = times * load.gathered * width / GPUS["h100"].rates().memory
    return seconds - attention + attention * load.pairs / (load.tokens**2 / 2) + moved


def main(words: Sequence[str] | None = None) -> int:
    """Print the table, and return 1 if a gain is smaller than expected."""
    arguments(__doc__, words)
    cells, gains, bars = zip(*rows(), strict=True)
    print_table(
        ("prompt", "answer", "packs of tokens", "with prompts once", "gain of a step"), cells
    )
    return int(any(gain < bar for gain, bar in zip(gains, bars, strict=True)))


def rows() -> Iterator[tuple[tuple[str, ...], float, float]]:
    """Yield the cells of each case's row in the table, its gain, and the least expected gain."""
    for prompt, answer, least in CASES:
        separate = packed([sequence(prompt, answer)] * (ANSWERS * PROMPTS))
        once = packed([group(prompt, answer)] * PROMPTS)
        gain = step_seconds(separate) / step_seconds(once)
        counts = (
            f"{len(load)} of {max(one.tokens for one in load):,}" for load in (separate, once)
        )
        yield (f"{prompt:,}", f"{answer:,}", *counts, f"{gain:.2f}"), gain, least


if __name__ == "__main__":
    raise SystemExit(main())
