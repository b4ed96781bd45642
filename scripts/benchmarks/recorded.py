"""A step of a contender as it ran, and the ideal step to compare it with."""

from __future__ import annotations

import torch.distributed as dist

from megatron_ext.runtime.recording import HostClock
from megatron_ext.schedule.schedule import is_compute
from megatron_ext.schedule.timeline import Event, Timeline
from megatron_ext.viz.page.run import Run, of_passes, simulated
from scripts.benchmarks.emulated import Contender


def recorded(contender: Contender) -> tuple[Run, ...]:
    """Record one more step of a ``contender`` on all ranks. Return its ideal run and the measured
    run; nothing for a contender that is not ours. All ranks call this."""
    program, recorder = contender.program, contender.recorder
    if program is None or recorder is None:
        return ()
    recording = recorder.record(HostClock())
    dist.barrier()
    contender.step()
    recorder.end()
    if contender.commit_or_rollback is not None:
        contender.commit_or_rollback()
    rows: list[list[Event]] = [[] for _ in range(dist.get_world_size())]
    # Of one machine, whose processes have one clock.
    dist.all_gather_object(rows, recording.read()[0])
    passes = tuple(event for row in rows for event in row if is_compute(event.action))
    return (
        simulated(f"{contender.name}, ideal", program),
        of_passes(
            f"{contender.name}, measured",
            Timeline(program.schedule, passes),
            program.problem.costs.of,
        ),
    )
