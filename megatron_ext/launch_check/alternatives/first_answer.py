"""A first answer for a launch line: to compare all schedules takes up to a minute."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_ext.schedule.build.registry import Mark, entry_of
from megatron_ext.schedule.plan.candidate import Candidate, Plan, VocabMethod
from megatron_ext.schedule.plan.planner import all_specs, make_plan
from megatron_ext.schedule.plan.recommendation import flags_of
from megatron_ext.schedule.planning_time import answered
from megatron_ext.schedule.progress import remark

if TYPE_CHECKING:
    from megatron_ext.launch_check.line_plan import ReadLine
    from megatron_ext.launch_check.variants import LineVariants

LONG = 1_024  # pipeline ranks times microbatches, from which on it takes so long
_FIRST = ("zb-v",)


def first_answer(read: ReadLine) -> Plan | None:
    """What a few schedules that take no search would gain, and say so. None where steps are so
    short that searches take no longer than the rest."""
    args, own = read.validated, read.variants.own
    assert own is not None
    methods = frozenset([VocabMethod.NAIVE])
    line = replace(read.variants, methods=methods, tries_recompute=False)
    plan = make_plan(line.variant, read.room, specs=tuple(dict.fromkeys((own, *_FIRST))))
    of_line, best = _of_line(plan, line), plan.best
    if best is not None:
        words = shlex.join((*flags_of(best, None), *line.rewritten(best.schedule).added))
        if best is of_line:
            words = "the line as it is"
        elif of_line is not None:
            words += f", a step {1 - best.step / of_line.step:.1%} shorter"
        remark(f"a first answer: {words}, as estimated; others are compared now")
        answered()
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    is_long = args.pipeline_model_parallel_size * microbatches >= LONG
    return plan if is_long else None


def whole_plan(read: ReadLine, first: Plan | None) -> Plan:
    """All schedules for the line. With a ``first`` answer the stable ones, if any of them fits,
    without what takes more time than its best, and what it has is not made again."""
    line = read.variants
    if first is None:
        return make_plan(line.variant, read.room, may_offload=True)
    own = (line.own or "").partition(":")[0]
    stable = [s for s in all_specs() if entry_of(s).mark is Mark.STABLE or entry_of(s).name == own]
    others = [spec for spec in all_specs() if spec not in stable]
    compare = partial(
        make_plan,
        line.variant,
        read.room,
        only_promising=True,
        may_offload=True,
        known=first.candidates,
        is_long=True,
    )
    plan = compare(specs=stable)
    if plan.candidates:
        return plan
    more = compare(specs=others)
    return Plan(more.candidates, {**plan.refusals, **more.refusals})


def _of_line(plan: Plan, line: LineVariants) -> Candidate | None:
    """The line as it stands."""
    for candidate in plan.candidates:
        is_own = (candidate.schedule, candidate.method) == (line.own, VocabMethod.NAIVE)
        if is_own and candidate.recompute == line.config.extras.recompute:
            return candidate
    return None
