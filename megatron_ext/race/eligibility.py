"""Condition for programs to run in a race: they run the microbatches of each stage in order, so
that changing between them changes no loss."""

from __future__ import annotations

from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.schedule import in_microbatch_order


def check_microbatch_order(program: Program) -> None:
    """Raise ValueError if ``program`` would change the results."""
    if not in_microbatch_order(program.schedule):
        raise ValueError(
            f"{program.schedule.name} does not run the microbatches of each stage in order, so "
            "training under it would change the last bits of losses: race without this schedule"
        )
