"""Sizes of a training job in one word: ``layers=64,hidden=6144,...,pp=8,m=64,tp=4,dp=2``.

A user who has no launch command yet knows these sizes. The word has the sizes of the pipeline and,
unless only costs are given, those of the model. Flags behind the word say how all schedules run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ext.base.words import shown
from megatron_ext.config import OVERLAP, PLAN, SCHEDULE_SETTINGS, PipelineConfig, flag
from megatron_ext.cost_model.short_form import Described, parse_model
from megatron_ext.schedule.problem import ScheduleOptions
from megatron_ext.written_settings import given_in

_NUMBERS = ("pp", "m", "tp", "dp")
_DISTRIBUTED = "distributed-optimizer"
_MOST = 10_000_000  # largest number of ranks, or of microbatches in a step
_EXAMPLE = (
    "write pp=8,m=64 (pipeline ranks, and microbatches of one pipeline in a step), and those "
    f"of the following that differ: tp=1,dp=1,{_DISTRIBUTED}=false"
)
# Options that a plan of sizes chooses itself, or that its recommendation could not contain.
_CHOSEN = ("p2p", "vocab_parallel", "activation_offload", "recompute")
# Settings that are also options of the command plan, under the same names.
_OPTIONS = ("memory_limit", "costs", "rank_speeds")
_TAKEN = tuple(name for name in SCHEDULE_SETTINGS if name not in _CHOSEN)


@dataclass(frozen=True)
class JobSizes:
    """Sizes of a training job that has no launch command yet.

    Attributes:
        pp, tp, dp: number of pipeline, tensor-parallel and data-parallel ranks.
        m: number of microbatches of one pipeline in a step.
        distributed_optimizer: whether data-parallel ranks share the optimizer states, each with a
            part.
        model: the model; None if a plan knows only the costs of its passes.
        layers: number of layers of the model; None if it is not known.
    """

    pp: int
    m: int
    tp: int = 1
    dp: int = 1
    distributed_optimizer: bool = False
    model: Described | None = None
    layers: int | None = None


def parse_sizes(text: str) -> JobSizes:
    """Return the sizes of a job in ``text``: of its pipeline, and of its model as in `parse_model`.

    If ``layers`` is all that the text has of a model, only the number of its layers is known.

    Raises:
        ValueError: a size is missing, unknown, given twice, or no number from 1.
    """
    numbers: dict[str, int] = {}
    of_model: list[str] = []
    is_distributed = False
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in (*_NUMBERS, _DISTRIBUTED):
            of_model.append(part)
        elif key == _DISTRIBUTED and value in ("true", "false"):
            is_distributed = value == "true"
        elif key in _NUMBERS and value.isdecimal() and 0 < int(value) <= _MOST:
            if key in numbers:
                raise ValueError(f"sizes {shown(text)!r}: {key} is given twice; {_EXAMPLE}")
            numbers[key] = int(value)
        else:
            raise ValueError(
                f"sizes {shown(text)!r}: {shown(part)!r} has no valid value; {_EXAMPLE}"
            )
    if missing := [key for key in ("pp", "m") if key not in numbers]:
        raise ValueError(f"sizes {shown(text)!r}: missing {', '.join(missing)}; {_EXAMPLE}")
    layers = None
    if len(of_model) == 1 and of_model[0].strip().startswith("layers="):
        layers = _layers(text, of_model.pop())
    if not of_model:
        described: list[str] = [key for key in ("tp", "dp") if key in numbers]
        if described := described + [_DISTRIBUTED] * is_distributed:
            keys = ", ".join(described)
            raise ValueError(
                f"sizes {shown(text)!r}: {keys} needs the sizes of a model: add them, as "
                "layers=64,hidden=6144,heads=48,sequence=4096,vocabulary=128000"
            )
        return JobSizes(numbers["pp"], numbers["m"], layers=layers)
    model = parse_model(",".join(of_model))
    return JobSizes(
        **numbers, distributed_optimizer=is_distributed, model=model, layers=model.layers
    )


def _layers(text: str, part: str) -> int:
    value = part.partition("=")[2]
    if not (value.isdecimal() and 0 < int(value) <= _MOST):
        raise ValueError(
            f"sizes {shown(text)!r}: {shown(part)!r} is no number of layers; write layers=32"
        )
    return int(value)


def options_of_sizes(flags: Sequence[str], sizes: JobSizes, *, has_costs: bool) -> ScheduleOptions:
    """Return the options of schedules that ``flags`` behind the sizes of a job request.

    Raises:
        ValueError: a flag is not understood, or a plan of sizes does not take it.
    """
    has_pairs = OVERLAP in flags
    given = given_in([word for word in flags if word != OVERLAP])
    for name, value in given.items():
        if name in _OPTIONS:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag(name)} is for launch commands; for sizes, write {option} {value}"
            )
        if name not in _TAKEN:
            taken = ", ".join(map(flag, _TAKEN))
            raise ValueError(
                f"{flag(name)}: a plan of sizes accepts only {taken} and {OVERLAP}, and chooses "
                f"the other options itself or cannot estimate them; drop {flag(name)}, or plan a "
                "launch command"
            )
    if has_pairs and sizes.model is not None and not has_costs:
        raise ValueError(
            f"{OVERLAP}: the model that sizes describe has no experts, whose messages this flag "
            "would hide; add --costs with overlap_saving=, give a launch command, or drop "
            f"{OVERLAP}"
        )
    return replace(PipelineConfig.parse(schedule=PLAN, **given).options, pairs=has_pairs)
