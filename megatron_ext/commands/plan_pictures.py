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

_MOST_SCHEDULES = 6  # on a page
_REFERENCE = "1f1b"


@dataclass(frozen=True)
class PlanPictures:
    """Picture files to write; None for those that were not requested."""

    plot: Path | None
    page: Path | None

    def check(self) -> None:
        """Raise ValueError if one of the picture files cannot be written, before work is done for
        it."""
        if self.plot is not None:
            check_picture(self.plot)
        if self.page is not None:
            check_page(self.page)

    def draw(self, plan: Plan, curves: Curves | None, *, in_seconds: bool) -> None:
        """Draw the pictures of ``plan``. ``curves`` are for its plot; ``in_seconds`` says whether
        its times are seconds.

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
    """Return Megatron's 1F1B, if it can run, and the candidates that no other beats in both time
    and memory, shortest step first. Each is rebuilt."""
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
