"""First answer for a launch command, before all schedules are compared.

To compare all of them takes up to a minute if steps are long. Until then the user sees the best of
a few schedules that take no search, and the rest is compared only with what could still beat it.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_ext.adapter.step_sizes import main_size
from megatron_ext.base.progress import remark
from megatron_ext.compile.registry import Maturity, entry_of
from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.planner.planner import NO_TIME, all_specs, make_plan
from megatron_ext.planner.planning_time import answered, provisional, within

if TYPE_CHECKING:
    from megatron_ext.launch.planner.parsed_launch import ParsedLaunch
    from megatron_ext.launch.planner.variants import LaunchVariants

LONG = 1_024  # product of pipeline ranks and microbatches from which a step counts as long
_FIRST = ("zb-v",)
_RECOMPUTE = 0.15  # share of the planning time after which the first answer comes without recompute


def is_long(args: Any) -> bool:
    """Return whether steps are so long that comparing all schedules takes a minute."""
    return bool(args.pipeline_model_parallel_size * main_size(args).microbatches >= LONG)


def first_answer(parsed: ParsedLaunch) -> Plan:
    """Compare the schedule of the command with few others that take no search, and log the best.

    If none of them fits into memory, they are tried with recompute, too.

    Returns:
        The plan without recompute.
    """
    schedule = parsed.variants.launch_schedule
    assert schedule is not None
    specs = tuple(dict.fromkeys((schedule, *_FIRST)))
    variants = replace(parsed.variants, methods=frozenset([VocabMethod.NAIVE]))
    simple = replace(variants, tries_recompute=False)
    plan = make_plan(simple.variant, parsed.allowed_bytes, specs=specs)
    fitting = plan
    if plan.best is None and variants.tries_recompute:
        with within(_RECOMPUTE), provisional():
            fitting = make_plan(variants.variant, parsed.allowed_bytes, specs=specs)
    words = _in_words(fitting, variants)
    if NO_TIME in fitting.refusals.values():
        words += ", and how much recompute would fit is not known yet"
    if NO_TIME not in plan.refusals.values():
        remark(f"a first answer: {words}; others are compared now")
        answered()
    return plan


def _in_words(plan: Plan, variants: LaunchVariants) -> str:
    best, unchanged = next(iter(plan.tied), None), _unchanged(plan, variants)
    if best is None:
        return "nothing fits so far"
    if best is unchanged:
        return "the unchanged command, as estimated"
    words = shlex.join(variants.written(best).added)
    if unchanged is not None:
        words += f", a step {1 - best.step / unchanged.step:.1%} shorter"
    return f"{words}, as estimated"


def whole_plan(parsed: ParsedLaunch, first: Plan) -> Plan:
    """Return the plan that compares all schedules for the command.

    If steps are long, and a stable schedule fits, only stable ones are compared, except those that
    take more time than the best of the ``first`` answer. Schedules of the first answer are used as
    they are.
    """
    variants = parsed.variants
    if not is_long(parsed.validated):
        return make_plan(variants.variant, parsed.allowed_bytes, may_offload=True)
    family = (variants.launch_schedule or "").partition(":")[0]
    stable = [
        s
        for s in all_specs()
        if entry_of(s).maturity is Maturity.STABLE or entry_of(s).name == family
    ]
    others = [spec for spec in all_specs() if spec not in stable]
    compare = partial(
        make_plan,
        variants.variant,
        parsed.allowed_bytes,
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


def _unchanged(plan: Plan, variants: LaunchVariants) -> Candidate | None:
    """Return the candidate in ``plan`` that is the unchanged command; None if there is none."""
    for candidate in plan.candidates:
        is_unchanged = (candidate.schedule, candidate.method) == (
            variants.launch_schedule,
            VocabMethod.NAIVE,
        )
        if is_unchanged and candidate.recompute == variants.config.options.recompute:
            return candidate
    return None
