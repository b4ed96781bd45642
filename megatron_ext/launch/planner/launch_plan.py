"""Plans of launch commands.

Megatron is imported only when a plan is made, as on a machine of the launch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.planner.log_comparison import comparison_with_log
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, ParsedLaunch, with_launch
from megatron_ext.planner.fitting import caching_candidates
from megatron_ext.planner.job_plan import JobPlan, plan_job


def plan_launch(
    request: LaunchRequest, *, with_curves: bool = False, lengths: Path | None = None
) -> JobPlan:
    """Return the plan that compares schedules, layouts and settings for the command of ``request``.

    ``with_curves``: for a picture, also with less memory and with other numbers of microbatches.
    ``lengths``: as in `plan_job`.

    Raises:
        ValueError: the command or a setting is not understood, or Megatron refuses it.
        PatchError: there is no Megatron to ask.
    """

    def planned(parsed: ParsedLaunch) -> JobPlan:
        from megatron_ext.launch.planner.launch_job import launch_job_of

        parsed.require_costs()
        job = launch_job_of(request, parsed)
        made = plan_job(job, with_curves=with_curves, lengths=lengths)
        return _with_figures_of_log(made, request.launch)

    with caching_candidates():
        return with_launch(request, planned)


def _with_figures_of_log(made: JobPlan, launch: Launch | None) -> JobPlan:
    """Return the plan ``made`` with a remark that compares its estimate with the launch's log.

    The estimate is that of the unchanged command; without a log there is no remark.
    """
    estimate = made.verdict.baseline
    if launch is None or launch.figures is None or launch.world_size is None or estimate is None:
        return made
    text = comparison_with_log(launch.figures, estimate, launch.world_size)
    return made if text is None else replace(made, remarks=(text, *made.remarks))
