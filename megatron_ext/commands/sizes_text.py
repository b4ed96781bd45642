"""The verdict of ``megatron-ext plan --any-sizes`` in at most ten lines.

A gain from other sizes may rest on parts of the estimate that no measurement has checked. The lines
name these parts, and what our schedules add to what better sizes give alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.planner.candidate import ALIKE
from megatron_ext.planner.sizes.sizes_plan import SizedAlternative, SizesPlan
from megatron_ext.planner.verdict import WORTH, candidate_name


def sizes_lines(made: SizesPlan) -> Iterator[str]:
    """Return the lines of the verdict of ``plan --any-sizes`` on other parallel sizes.

    They compare the launch with the best of Megatron's own schedules, and with the best of all.
    """
    baseline, best, control = made.baseline, made.best, made.control
    if baseline is None:
        yield f"now:        {made.job}, cannot run"
    else:
        excess = f", {bytes_text(made.excess)} more than a rank may take" * (made.excess > 0)
        yield f"now:        {made.job}: {_step(baseline)}{excess}"
    if best is None:
        return
    yield f"your sizes: {_found(made, made.same_sizes)}"
    yield f"control:    {_found(made, control)}: the best of Megatron's own schedules, any sizes"
    yield f"any:        {'as the control' if _are_same(best, control) else _found(made, best)}"
    if made.added is not None and control is not None:
        ours = f"{made.added:.1%} of the control's step"
        yield f"ours add:   {ours if made.added > ALIKE else 'nothing to the control'}"
    yield from _not_checked(made)
    if made.checked is not None:
        yield f"checked:    {_found(made, made.checked)}: the best that adds no unchecked part"
    if made.is_large and baseline is not None:
        yield (
            f"doubt it:   above 1.3 times is rare for a tuned launch. A rank computes for "
            f"{baseline.passes:.4g} s of a step now, for {best.passes:.4g} s then"
        )
    if made.spread is not None and made.spread.is_within:
        yield f"spread:     {made.spread.text}"
    if made.keeps:
        yield f"verdict:    keep it: nothing saves {WORTH:.0%} of a step"
    elif made.command:
        yield f"write:\n{made.command}"
    else:
        yield f"write:      {made.written}"


def _are_same(one: SizedAlternative, other: SizedAlternative | None) -> bool:
    """Return whether two alternatives have the same sizes, schedule, recompute and layout."""
    if other is None:
        return False
    before, after = (
        (each.sizes, candidate_name(each.candidate), each.recompute, each.layout)
        for each in (one, other)
    )
    return before == after


def _not_checked(made: SizesPlan) -> Iterator[str]:
    """Yield a line on parts of the estimates that no measurement has checked, if there are any.

    The line names the answers that rest on each part.
    """
    answers = {"now": made.baseline, "control": made.control, "any": made.best}
    parts: dict[str, list[str]] = {}
    for name, one in answers.items():
        for part in () if one is None else one.not_checked:
            parts.setdefault(part, []).append(name)
    if parts:
        named = "; ".join(f"{part} ({', '.join(names)})" for part, names in parts.items())
        yield f"unchecked:  {named}: no measurement has checked these parts of the estimate"


def compared_line(made: SizesPlan) -> str:
    """Return a line on how many combinations of sizes were compared."""
    return f"{counted(made.compared, 'combination')} of sizes compared"


def _found(made: SizesPlan, one: SizedAlternative | None) -> str:
    if one is None:
        return "nothing fits"
    if one is made.baseline:
        return "unchanged"
    words = [one.title] if made.baseline is None or one.sizes != made.baseline.sizes else []
    schedule = candidate_name(one.candidate)
    words.append(f"under {schedule}" if words else schedule)
    if one.candidate.report.offloads:
        words.append("with offload")
    if made.baseline is not None and one.recompute != made.baseline.recompute:
        words.append(f"with recompute {one.recompute}")
    text = f"{', '.join(words)}: {_step(one)}"
    if made.baseline is None:
        return text
    share = 1 - one.seconds / made.baseline.seconds
    return f"{text}, {abs(share):.1%} {'shorter' if share >= 0 else 'longer'}"


def _step(one: SizedAlternative) -> str:
    fullest = one.candidate.fullest
    memory = "" if fullest is None else f", {bytes_text(fullest)} on the fullest rank"
    return f"{one.seconds:.4g} s a step{memory}"
