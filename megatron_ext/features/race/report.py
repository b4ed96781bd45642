"""Remarks on a race before it is run: the predicted gain of each candidate, and a training too
short for it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.observe.launch_remark import JudgedLaunch, LaunchRemark
from megatron_ext.race.rounds import Race


def race_remarks(launch: JudgedLaunch) -> Iterator[LaunchRemark]:
    """Yield remarks on a race: the predicted gain of each candidate over the baseline.

    A further remark says if the training is too short for all rounds.
    """
    race = launch.config.race
    if race is None:
        return
    took = step_seconds(launch.program, launch.program.problem.costs)
    for spec, (program, *_) in launch.contenders.items():
        costs, schedule = program.problem.costs, program.schedule
        held = max(peaks(schedule, in_microbatches(schedule)))
        text = f"{spec} is predicted {took / step_seconds(program, costs):.3f} times as fast as"
        if costs.no_estimate:
            text = f"{spec} has no estimate of its speed relative to"
        text += f" {race.baseline}, peak {counted(held, 'microbatch')}"
        if costs.held_bytes is not None:
            text += f" ({bytes_text(max(peaks(schedule, in_bytes(costs))))})"
        yield LaunchRemark("race", text)
    needed, iterations = Race(race.baseline, race.candidates).iterations_left, launch.iterations
    if launch.contenders and iterations is not None and iterations < needed:
        text = f"it takes up to {needed} iterations, and the training has fewer"
        yield LaunchRemark("race", text, "train longer to see its end")
