"""Remark on the size of a trace: one with too many passes is too large to be looked at."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.base.setting import flag
from megatron_ext.base.words import bytes_text, counted
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.observe.launch_remark import JudgedLaunch, LaunchRemark
from megatron_ext.observe.trace import LARGEST_WRITTEN, TRACED_OF_RUN, bytes_of_step

_LARGE = 2**28  # size of a trace in bytes from which a browser takes long to show it


def trace_remarks(launch: JudgedLaunch) -> Iterator[LaunchRemark]:
    """Yield a remark on the bytes of a trace, with a fix if it is too large for a viewer."""
    config, program = launch.config, launch.program
    if config.trace is None:
        return
    steps = len(config.trace_iters or TRACED_OF_RUN)
    size = steps * bytes_of_step(simulate(program, program.problem.costs))
    text = f"about {bytes_text(size)} in {config.trace}, for {counted(steps, 'iteration')}"
    if size > LARGEST_WRITTEN:
        text += f", and no more than {bytes_text(LARGEST_WRITTEN)} are written"
    fix = f"write {flag('trace_iters')} A:B with fewer iterations" if size > _LARGE else ""
    yield LaunchRemark("trace", text, fix)
