"""Plans of launch commands.

Megatron is imported only inside, as it would be on a machine of the launch.
"""

from __future__ import annotations

from pathlib import Path

from megatron_ext.launch_planner.parsed_launch import LaunchRequest, ParsedLaunch, with_launch
from megatron_ext.planner.fitting import caching_candidates
from megatron_ext.planner.job_plan import JobPlan, plan_job


def plan_launch(
    request: LaunchRequest, *, with_curves: bool = False, lengths: Path | None = None
) -> JobPlan:
    """Compare all ways to train the launch command of ``request``.

    ``with_curves``: for a picture, also with less memory and with other numbers of microbatches.
    ``lengths``: as in `plan_job`.

    Raises:
        ValueError: the command or a setting is not understood, or Megatron refuses it.
        PatchError: there is no Megatron to ask.
    """

    def planned(parsed: ParsedLaunch) -> JobPlan:
        from megatron_ext.launch_planner.launch_job import launch_job_of

        return plan_job(launch_job_of(request, parsed), with_curves=with_curves, lengths=lengths)

    with caching_candidates():
        return with_launch(request, planned)
