"""Command line with which torchtitan runs a table of ours.

torchtitan takes the order of passes from the table, and the placement of stages from the name of a
schedule (``_pipeline_module_split`` in its ``distributed/pipeline_parallel.py``): a line from 1F1B,
a loop from Interleaved1F1B, a V from ZBVZeroBubble. There is no name for waves.
"""

from __future__ import annotations

from pathlib import Path

from megatron_ext.schedule.placement import Placement, line, loop, v


def for_torchtitan(placement: Placement, microbatches: int, table: Path) -> str:
    """Return the command-line arguments with which torchtitan runs a schedule's CSV ``table``.

    If torchtitan cannot run the schedule, return a line that says why.
    """
    name = _schedule_with(placement)
    if name is None:
        return (
            f"torchtitan cannot place the stages of a {placement.name}; torch's own runtime takes "
            f"them from the table"
        )
    words = (
        f"torchtitan: --parallelism.pipeline_parallel_degree {placement.ranks} "
        f"--parallelism.pipeline_parallel_schedule {name} "
        f"--parallelism.pipeline_parallel_schedule_csv {table} "
        f"--parallelism.num_pp_microbatches {microbatches}"
    )
    if placement.chunks <= 2:
        return words
    return (
        f"{words}, and --parallelism.pipeline_parallel_layers_per_stage such that there are "
        f"{placement.stages} stages"
    )


def _schedule_with(placement: Placement) -> str | None:
    """Return the name of a torch schedule that has this placement of stages; None if there is none.

    It does not matter on which rank a V opens.
    """
    ranks = placement.ranks
    if placement.rank_of == line(ranks).rank_of:
        return "1F1B"
    if placement.rank_of == loop(ranks, vpp=placement.chunks).rank_of:
        return "Interleaved1F1B"
    return "ZBVZeroBubble" if placement.rank_of == v(ranks).rank_of else None
