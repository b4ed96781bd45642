"""Share of each GPU that the communicators of a launch take, and the time of a step without them.

A schedule with many channels has many communicators, each of which occupies multiprocessors while
it waits. That is no error, but a user should know when it costs more than it is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ext.base.words import bytes_text
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.communicators import (
    communicators,
    ctas_of_each,
    ctas_used,
    is_within_share,
)
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.launch.doctor.launch_report import Finding, Severity
from megatron_ext.schedule.problem import P2P

SETTINGS = "--nccl-communicator-config-path"
NEGLIGIBLE = 0.0005  # share of a step below which it would be printed as 0.0 %


def check_communicators(
    config: PipelineConfig,
    program: Program,
    multiprocessors: int,
    nccl_settings: Mapping[str, int],
    left_bytes: float | None,
    shapes_vary: bool,
) -> Finding:
    """Return a finding on the communicators of a rank of ``program`` beyond Megatron's own.

    It tells their number, and their share of a GPU's multiprocessors.

    Args:
        config: the settings of ``program``.
        multiprocessors: number of multiprocessors of a GPU.
        nccl_settings: settings of the pipeline's communicators in the user's file for NCCL.
        left_bytes: bytes of a GPU that the predicted model and activations leave free; None if
            unknown.
        shapes_vary: whether the shapes of tensors that stages send differ between microbatches.
    """
    subject = "communicators"
    if program.problem.options.p2p is P2P.BATCHED:
        text = "none beyond Megatron's own: all messages go over the pipeline's"
        return Finding(Severity.RIGHT, subject, text)
    of_ranks = communicators(program)
    busiest = max(of_ranks, key=lambda of_rank: of_rank.total)
    fewest = ctas_of_each(busiest.total, multiprocessors)
    ctas = ctas_used(nccl_settings.get("max_ctas", max(fewest, nccl_settings.get("min_ctas", 0))))
    taken = ctas * busiest.total
    memory = max(of_rank.buffer_bytes(ctas) for of_rank in of_ranks)
    text = (
        f"a rank has up to {busiest.total} beyond Megatron's own ({busiest.channels} for "
        f"messages, {busiest.collectives} for collectives), {ctas} CTAs each: they take {taken} "
        f"of a GPU's {multiprocessors} multiprocessors when all wait, and about "
        f"{bytes_text(memory)} of buffers over NVLink"
    )
    batched = _batched(config, program, shapes_vary)
    if not is_within_share(taken, multiprocessors):
        text += "; passes may wait for messages that take more than a quarter of a GPU"
        if ctas > fewest:
            file = f"max_ctas and min_ctas of pp in the file of {SETTINGS}"
            return Finding(Severity.REMARK, subject, text, f"write {fewest} for {file}")
        return Finding(Severity.REMARK, subject, text, batched)
    if left_bytes is not None and memory > left_bytes:
        text += f", and the GPU has {bytes_text(max(0.0, left_bytes))} left"
        return Finding(Severity.REMARK, subject, text, batched)
    return Finding(Severity.RIGHT, subject, text, batched)


def _batched(config: PipelineConfig, program: Program, shapes_vary: bool) -> str:
    """Return, as text, the predicted effect of batched messages (`P2P.BATCHED`) on ``program``.

    Empty if messages cannot be batched.
    """
    if shapes_vary:
        return ""
    try:
        config = replace(config, p2p=P2P.BATCHED)
        problem = program.problem.with_options(p2p=P2P.BATCHED)
        batched = build_program(config.resolved_spec, problem)
    except ValueError:
        return ""
    words = f"{flag('p2p')} {P2P.BATCHED} makes none of them"
    makespans = [simulate(made, made.problem.costs).makespan for made in (batched, program)]
    longer = makespans[0] / makespans[1] - 1
    if longer < NEGLIGIBLE:
        return f"{words}, and a step is predicted to take no longer"
    return f"{words}, for a step predicted {longer:.1%} longer"
