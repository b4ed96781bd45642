"""The verdict of a plan in at most ten lines.

Most users read no table. These lines say which schedule the job has, which flags to write, what
they gain, and what the gain rests on, or that no change is worth it.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.cost_model.gpus import USABLE
from megatron_ext.planner.candidate import ALIKE
from megatron_ext.planner.job_plan import JobPlan
from megatron_ext.planner.unequal_gains import UnequalGains
from megatron_ext.planner.verdict import (
    WORTH,
    Alternative,
    Verdict,
    is_stock,
    shortest_of_others,
)

_SHOWN = 3  # largest number of tied schedules that are named


def verdict_lines(made: JobPlan) -> Iterator[str]:
    """Return the lines of a plan's verdict: its recommendation, the gain, and flags to write."""
    found = made.verdict
    taken = found.taken
    yield f"now:       {_baseline(made)}"
    if taken is None:
        return
    if found.keeps:
        yield f"verdict:   keep it: {_no_gain(found)}{_not_compared(made)}"
        if refused := _all_of_ours_refused(made):
            yield f"refused:   {refused}"
    else:
        yield from _change(made, taken)
    if made.assumed:
        yield f"assumed:   {made.assumed}"
    for microbatches, seconds in taken.other_steps.items():
        yield f"other:     {_other_step(made, microbatches, seconds)}"
    unequal = made.unequal
    if unequal is not None:
        yield from _unequal(made, unequal)
    arranges = unequal is not None and bool(unequal.flags)
    if made.command and (arranges or not found.keeps):
        yield f"write:\n{made.command}"


def _change(made: JobPlan, taken: Alternative) -> Iterator[str]:
    found, stock = made.verdict, made.verdict.stock
    if stock is not None and stock is not taken and _is_most(made, stock):
        yield (
            f"first:     {made.of_stock} (Megatron's own): {found.saving_of(stock):.1%} shorter, "
            f"{_step(made, stock)}{_memory(stock)}"
        )
    yield f"verdict:   {made.written or 'Megatron 1f1b'}{_by_megatron(made, taken)}"
    if found.baseline is not None:
        yield f"gain:      {_gain(made, taken)}"
        if made.spread is not None and made.spread.is_within:
            yield f"spread:    {made.spread.text}"
    else:
        yield f"step:      {_step(made, taken)}"
    yield f"memory:    {_memory_of_rank(made, taken)}"
    if found.tie:
        yield f"same time: {_tie(made, taken)}"


def _unequal(made: JobPlan, gains: UnequalGains) -> Iterator[str]:
    """Yield lines on the gain of another order and dealing of unequal microbatches.

    The last line has the flags to write for that.
    """
    if gains.shared is not None:
        yield (
            f"prompts:   computed once, {_saved(gains.shared)} than the same microbatches with "
            f"each prompt computed for each of its answers"
        )
    if gains.refused and not gains.flags:
        yield f"unequal:   nothing is arranged, which may save {gains.most:.1%}: {gains.refused}"
        return
    on = f" on each of {gains.replicas} replicas" if gains.replicas > 1 else ""
    if gains.expert_replicas > 1:
        on += f", of which {gains.expert_replicas} share experts and wait for one another"
    yield (
        f"unequal:   {gains.seconds:.4g} {_unit(made)} a step in order of arrival under "
        f"{gains.schedule}: "
        f"{counted(gains.steps, 'step')} of {counted(gains.microbatches, 'microbatch')}{on}"
    )
    yield f"order:     {_saved(gains.order)}"
    if gains.deal is not None:
        yield f"deal:      {_saved(gains.deal)} with both"
    if gains.program is None:
        yield f"program:   none for the places of {gains.schedule} can be searched for"
    else:
        yield f"program:   {_saved(gains.program)} with one for the places too"
    if gains.refused:
        yield f"refused:   {gains.refused}"
    nothing = f"nothing; no part saves {WORTH:.0%} of a step"
    yield f"arrange:   {shlex.join(gains.flags) or nothing}"


def _saved(share: float) -> str:
    return f"{abs(share):.1%} {'shorter' if share >= 0 else 'longer'}"


def _baseline(made: JobPlan) -> str:
    baseline = made.verdict.baseline
    if baseline is None:
        why = f"cannot run: {made.why_not}" if made.why_not else "is not compared"
        return f"{made.job}, {why}"
    text = f"{made.job}: {_step(made, baseline)}{_memory(baseline)}"
    if made.verdict.excess:
        text += f", {bytes_text(made.verdict.excess)} more than a rank may take"
    return text


def _no_gain(found: Verdict) -> str:
    runner_up = shortest_of_others(found)
    if not runner_up:
        return "nothing that fits takes less time"
    return f"nothing that fits saves {WORTH:.0%} of a step{runner_up}"


def _not_compared(made: JobPlan) -> str:
    """Return words on what the plan had no time to compare; "" if it compared everything."""
    if not made.is_short:
        return ""
    return f"; the time of the plan ended before all was compared{_kinds_not_compared(made)}"


def _kinds_not_compared(made: JobPlan) -> str:
    return f": {', '.join(made.unfinished)}" if made.unfinished else ""


_REFUSAL = re.compile(r"--pipeline-schedule \S+ (does not go with .*)")


def _all_of_ours_refused(made: JobPlan) -> str:
    """Return words on why Megatron's settings rule out all schedules of ours; "" if they do not.

    The words are the most frequent reason, with its remedy.
    """
    if not all(is_stock(candidate) for candidate in made.plan.candidates):
        return ""
    found = map(_REFUSAL.search, made.plan.refusals.values())
    commonest = Counter(refusal[1] for refusal in found if refusal).most_common(1)
    if not commonest:
        return ""
    return f"all schedules of ours, most since --pipeline-schedule {commonest[0][0]}"


def _is_most(made: JobPlan, stock: Alternative) -> bool:
    """Return whether Megatron's own flags bring at least half of the gain."""
    found = made.verdict
    if found.taken is None or found.baseline is None:
        return False
    return 2 * found.saving_of(stock) >= found.saving_of(found.taken)


def _by_megatron(made: JobPlan, taken: Alternative) -> str:
    if not is_stock(taken.candidate):
        return ""
    ours = "ours add nothing to it"
    if refused := _all_of_ours_refused(made):
        ours = f"refused are {refused}"
    elif made.is_short:
        ours = f"not all of ours were compared in time{_kinds_not_compared(made)}"
    return f" (Megatron's own; {ours})"


def _gain(made: JobPlan, taken: Alternative) -> str:
    found, stock = made.verdict, made.verdict.stock
    gain, step = found.gain, _step(made, taken)
    text = f"{gain:.1%} shorter" if gain > 0 else f"it fits; {-gain:.1%} longer"
    text += f"{_compared(made, taken)}, {step}"
    if stock is None or stock is taken:
        return text
    of_stock = found.saving_of(stock)
    text += f": {of_stock:.1%} by Megatron's own flags ({made.of_stock}), "
    # The gain in time is negligible, so the schedule was chosen for its lower memory.
    if taken.seconds > (1 - WORTH) * stock.seconds:
        less = _amount(stock, stock.holds - taken.holds)
        return f"{text}and ours take {less} less in the same time"
    return f"{text}{gain - of_stock:.1%} by ours"


def _compared(made: JobPlan, taken: Alternative) -> str:
    """Return words on the two times that a gain compares, if they are a span and a makespan.

    The words are "" if both times are of one kind.
    """
    baseline = made.verdict.baseline
    if baseline is None or baseline.candidate.overlaps == taken.candidate.overlaps:
        return ""
    new, now = (
        "span of overlapping steps" if one.candidate.overlaps else "makespan"
        for one in (taken, baseline)
    )
    return f" (the {new} compared with the {now} now)"


def _step(made: JobPlan, one: Alternative) -> str:
    return f"{one.seconds:.4g} {_unit(made)} a step"


def _unit(made: JobPlan) -> str:
    return "s" if made.in_seconds else "cost units"


def _amount(one: Alternative, held: float) -> str:
    """Return the memory ``held`` as text, in bytes or microbatches, as the plan measures it."""
    is_known = one.candidate.fullest is not None
    return bytes_text(held) if is_known else counted(round(held, 2), "microbatch")


def _memory(one: Alternative) -> str:
    fullest = one.candidate.fullest
    return "" if fullest is None else f", {bytes_text(fullest)} on the fullest rank"


def _memory_of_rank(made: JobPlan, taken: Alternative) -> str:
    baseline, fullest = made.verdict.baseline, taken.candidate.fullest
    if fullest is None:
        peak = f"{counted(taken.candidate.report.peak, 'microbatch')} on the fullest rank"
        return peak if baseline is None else f"{peak} (now {baseline.candidate.report.peak:g})"
    text = f"{bytes_text(fullest)} on the fullest rank"
    if baseline is not None and baseline.candidate.fullest is not None:
        text += f" (now {bytes_text(baseline.candidate.fullest)})"
    if made.free is None or taken.candidate.memory is None:
        return text
    rank = max(taken.candidate.memory, key=lambda rank: rank.total)
    reserved = made.free.reserved_for(rank.total, rank.model.lasting)
    takes, gpu = rank.total + reserved, made.free.usable / USABLE
    return (
        f"{text}; with {bytes_text(reserved)} that its allocator reserves it takes "
        f"{takes / gpu:.0%} of the GPU, and {bytes_text(max(made.free.usable - takes, 0.0))} are "
        f"left"
    )


def _other_step(made: JobPlan, microbatches: int, seconds: float) -> str:
    baseline, unit = made.verdict.baseline, " s" if made.in_seconds else ""
    text = f"a step of {counted(microbatches, 'microbatch')} takes {seconds:.4g}{unit}"
    now = None if baseline is None or made.verdict.keeps else baseline.other_steps.get(microbatches)
    return text if now is None else f"{text} (now {now:.4g})"


def _tie(made: JobPlan, taken: Alternative) -> str:
    least: dict[str, Alternative] = {}
    for one in sorted(made.verdict.tie, key=lambda one: one.holds):
        least.setdefault(one.name, one)
    names = [
        f"{name} ({_amount(one, one.holds)})" for name, one in least.items() if name != taken.name
    ] or ["the same with other layers on its stages"]
    more = f" and {counted(len(names) - _SHOWN, 'other')}" if len(names) > _SHOWN else ""
    why = "takes the least memory"
    if taken.holds > min(one.holds for one in made.verdict.tie):
        why = f"takes within {ALIKE:.0%} of the least memory with the fewest settings"
    return (
        f"{', '.join(names[:_SHOWN])}{more}, within {ALIKE:.0%}; of these the verdict {why}, "
        f"{_amount(taken, taken.holds)}"
    )
