"""Pictures of ``megatron-ext plan``: all schedules by time and memory, and a page of timelines.

Files that cannot be written are refused before a plan has taken its minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.commands.output import command_line
from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.planner.curves import Curves
from megatron_ext.viz.draw import check_picture
from megatron_ext.viz.page.run import Run, simulated_run, title_of
from megatron_ext.viz.page.write import SECONDS, Page, check_page, write_page
from megatron_ext.viz.plan_picture import draw_plan

_MOST_SCHEDULES = 6  # largest number of schedules on a page
_REFERENCE = "1f1b"


@dataclass(frozen=True)
class PlanPictures:
    """Pictures of a plan to write.

    Attributes:
        plot: file of the plot of time against memory; None if it is not requested.
        page: file of the page of timelines; None if it is not requested.
    """

    plot: Path | None
    page: Path | None

    def check(self) -> None:
        """Raise ValueError if a file cannot be written, before the plan takes its time."""
        if self.plot is not None:
            check_picture(self.plot)
        if self.page is not None:
            check_page(self.page)

    def draw(self, plan: Plan, curves: Curves | None, *, in_seconds: bool) -> None:
        """Draw the pictures of ``plan`` that are requested.

        Args:
            curves: curves of the plot; None without a plot.
            in_seconds: whether times are seconds, and not units of costs.

        Raises:
            OSError: a file cannot be written.
        """
        if self.plot is not None and curves is not None and plan.candidates:
            draw_plan(plan, curves, self.plot)
        if self.page is not None and plan.candidates:
            unit = SECONDS if in_seconds else ""
            title = "the schedules of a plan that none beats in both time and memory"
            if any(candidate.variant.model is not None for candidate in plan.candidates):
                title += ", without the optimizer's time"
            write_page(Page(title, _runs_of_plan(plan), command_line(), unit), self.page)


def _runs_of_plan(plan: Plan) -> tuple[Run, ...]:
    """Return the simulated runs of a page: those of the candidates that no other candidate beats in
    both time and memory.

    Megatron's 1F1B comes first, if it can run, then the others by the length of their steps.
    """
    plain = (c for c in plan.candidates if c.method is VocabMethod.NAIVE)
    stock = [candidate for candidate in plain if candidate.schedule == _REFERENCE]
    shown = dict.fromkeys([*stock, *plan.front])
    return tuple(
        simulated_run(_title(candidate), candidate.program())
        for candidate in list(shown)[:_MOST_SCHEDULES]
    )


def _title(candidate: Candidate) -> str:
    title = title_of(candidate.schedule, candidate.variant.problem.options)
    if candidate.method is VocabMethod.REDISTRIBUTED:
        title += ", layers moved away from the output layer"
    return title
