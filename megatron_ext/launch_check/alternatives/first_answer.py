"""A first answer for a launch line, where to compare all schedules takes minutes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_ext.schedule.plan.planner import Candidate, Plan, VocabMethod, make_plan
from megatron_ext.schedule.plan.recommendation import flags_of
from megatron_ext.schedule.progress import remark

if TYPE_CHECKING:
    from megatron_ext.launch_check.line_plan import ReadLine
    from megatron_ext.launch_check.variants import LineVariants

LONG = 1_024  # pipeline ranks times microbatches, from which on it takes so long
_FIRST = ("zb-v", "zb-1p")


def first_answer(read: ReadLine) -> Plan | None:
    """What a few schedules that take no search would gain, and say so. None where the whole plan
    takes no longer."""
    args, own = read.validated, read.variants.own
    assert own is not None
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if args.pipeline_model_parallel_size * microbatches < LONG:
        return None
    methods = frozenset([VocabMethod.NAIVE])
    line = replace(read.variants, methods=methods, tries_recompute=False)
    plan = make_plan(line.variant, read.room, specs=tuple(dict.fromkeys((own, *_FIRST))))
    of_line, best = _of_line(plan, line), plan.best
    if best is not None and best is not of_line:
        words = " ".join((*flags_of(best, None), *line.rewritten(best.schedule).added))
        if of_line is not None:
            words += f", a step {1 - best.step / of_line.step:.1%} shorter"
        remark(f"a first answer: {words}, as estimated; others are compared now")
    return plan


def whole_plan(read: ReadLine, first: Plan | None) -> Plan:
    """All schedules for the line. With a ``first`` answer that is not kept up by what is proved to
    take more time than its best."""
    line = read.variants
    if first is None:
        return make_plan(line.variant, read.room, may_offload=True)
    plan = make_plan(line.variant, read.room, True, may_offload=True, better_than=first.best)
    of_line = _of_line(first, line)
    if of_line is None or _of_line(plan, line) is not None:
        return plan
    candidates = sorted([*plan.candidates, of_line], key=lambda c: (c.step, c.report.peak))
    refusals = dict(plan.refusals)
    for name, method in plan.refusals:
        if (line.spec(name), method) == (line.own, VocabMethod.NAIVE):
            del refusals[name, method]
    return Plan(tuple(candidates), refusals)


def _of_line(plan: Plan, line: LineVariants) -> Candidate | None:
    """The line as it stands."""
    for candidate in plan.candidates:
        is_own = (candidate.schedule, candidate.method) == (line.own, VocabMethod.NAIVE)
        if is_own and candidate.recompute == line.config.extras.recompute:
            return candidate
    return None
