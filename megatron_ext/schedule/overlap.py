"""What post-validation gains: the steps of some schedules overlap, those of others cannot."""

from __future__ import annotations

from megatron_ext.schedule.simulate import simulate, step_seconds
from megatron_ext.schedule.verify import Program

_LEAST = 1e-3  # of the makespan, below which there is no point in it


def is_gain(makespan: float, step: float) -> bool:
    """Whether a step of ``step`` seconds is worth overlapping steps for, where one alone takes
    ``makespan``."""
    return step < makespan * (1 - _LEAST)


def what_overlapping_gains(program: Program) -> str:
    """What a step costs with post-validation and without, in words. (``program`` has it.)"""
    makespan, step = _figures(program)
    if not is_gain(makespan, step):
        name = program.schedule.name
        return (
            f"{name}'s steps cannot overlap: its span is its makespan ({makespan:.4g}); those of "
            f"zb-2p, zb-auto, zb-v and v-auto can, on more than one rank"
        )
    return (
        f"with post-validation a step costs {step:.4g} in the long run, without {makespan:.4g} "
        f"({1 - step / makespan:.1%} less)"
    )


def check_overlaps(program: Program) -> None:
    """Raise ValueError if post-validation, which ``program`` has, makes its steps no shorter."""
    makespan, step = _figures(program)
    if not is_gain(makespan, step):
        raise ValueError(
            f"post-validation gains nothing with {program.schedule.name} on "
            f"{program.problem.ranks} ranks and {program.problem.microbatches} microbatches: a "
            f"step costs {step:.4g} with it and {makespan:.4g} without, as its steps cannot "
            f"overlap; use a schedule whose steps can (zb-2p, zb-auto, zb-v, v-auto), or drop it"
        )


def _figures(program: Program) -> tuple[float, float]:
    costs = program.problem.costs
    return simulate(program, costs).makespan, step_seconds(program, costs)
