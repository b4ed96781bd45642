"""``megatron-ext plan -- LAUNCH COMMAND``: all ways to train it, and the verdict among them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megatron_ext.adapter.pairs.overlap_setting import FLAG
from megatron_ext.doctor.words import read_launch
from megatron_ext.launch_planner.alternatives.changed import Changed
from megatron_ext.launch_planner.alternatives.first_answer import first_answer, whole_plan
from megatron_ext.launch_planner.alternatives.less_memory import what_would_fit
from megatron_ext.launch_planner.alternatives.pairs import other_pairs
from megatron_ext.launch_planner.alternatives.without_full_recompute import (
    without_full_recompute,
)
from megatron_ext.launch_planner.command_line import command_with
from megatron_ext.launch_planner.parsed_launch import LaunchRequest, ParsedLaunch, with_launch
from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.planner.confirmation import confirmed_verdict
from megatron_ext.planner.curves import curves_of
from megatron_ext.planner.fitting import consider, keeping_candidates
from megatron_ext.planner.half_pipeline import Halves
from megatron_ext.planner.job_plan import JobPlan
from megatron_ext.planner.long_sequences import LongSequences
from megatron_ext.planner.planning_time import begin, until_end, within
from megatron_ext.planner.verdict import NOTHING, WORTH, Alternative, Written
from megatron_ext.words import bytes_text
from megatron_ext.written_settings import from_argv

if TYPE_CHECKING:
    from megatron_ext.launch_planner.variants import LineVariants
    from megatron_ext.planner.layouts.lines import Lines

# Shares of the planning time after which the comparison of schedules, layouts and changes ends. The
# rest is for what is built whole.
_SCHEDULES, _LAYOUTS, _CHANGES = 0.5, 0.75, 0.9

_ON_PAIRS = (
    f"{FLAG}: that half of the time of experts' messages is hidden so is assumed; what is "
    f"published differs threefold, and no GPU has run our pairs"
)


def plan_line(request: LaunchRequest) -> JobPlan:
    """Compare all ways to train the launch command of ``request``.

    Raises:
        ValueError: the command, or what is asked about it, is not understood, or Megatron refuses
            it.
        PatchError: there is no Megatron to ask.
    """
    with keeping_candidates():
        return with_launch(request, partial(_plan, request))


def plan_halves(request: LaunchRequest) -> Halves:
    """The launch command of ``request``, and the same on half of its pipeline ranks.

    Raises:
        ValueError, PatchError: as `plan_line`.
    """

    def halves(parsed: ParsedLaunch) -> Halves:
        from megatron_ext.launch_planner.alternatives.half_of_launch import halves_of

        return halves_of(parsed)

    return with_launch(request, halves)


def _plan(request: LaunchRequest, parsed: ParsedLaunch) -> JobPlan:
    line, free = parsed.variants, parsed.room
    assert line.own is not None
    begin()
    first = first_answer(parsed)
    with within(_SCHEDULES):
        plan = whole_plan(parsed, first)
    with within(_LAYOUTS):
        layouts = until_end(partial(_layouts, parsed), None)
    own = _baseline(parsed, plan)
    is_measured = parsed.measured is not None or not line.config.costs.is_estimate
    changes: list[Changed | None] = []
    with within(_CHANGES):
        if not is_measured:
            in_pairs = partial(other_pairs, line, plan, free, is_long=first is not None)
            changes.append(until_end(partial(without_full_recompute, line, plan, free), None))
            changes.append(until_end(in_pairs, None))
        long_sequences = until_end(partial(_long_sequences, parsed, plan), None)
    pool = _Pool(parsed)
    others = [one for changed in changes if changed is not None for one in pool.of(changed)]
    others += [] if layouts is None else pool.of_layouts(layouts)
    if long_sequences is not None and long_sequences.best is not None:
        written_for_slices = long_sequences.written
        others.append(pool.with_seconds(long_sequences.best, lambda: written_for_slices))
    of_plan = pool.of(Changed(line, tuple(made for made in plan.candidates if made is not own)))
    baseline = None if own is None else pool.with_seconds(own, lambda: NOTHING)
    refusal = partial(refusal_of, request, parsed)
    found, plan = confirmed_verdict(plan, baseline, [*of_plan, *others], free, refusal)
    fallbacks: tuple[str, ...] = ()
    if found.taken is None:
        fitting = until_end(lambda: tuple(what_would_fit(line, free)), fallbacks)
        fallbacks = *_what_slices_would(long_sequences), *fitting
    remarks = (*parsed.remarks, *_on_barred(layouts))
    made = JobPlan(
        plan,
        found,
        f"{parsed.facts}, under {line.own}",
        remarks=remarks,
        fallbacks=fallbacks,
        free=parsed.free,
        is_estimate=not is_measured,
        others=tuple(others),
        long_sequences=long_sequences,
        curves=curves_of(plan, line.variant, free) if request.with_curves else None,
    )
    if own is None or own not in plan.candidates:
        made = replace(made, why_not=_why_not_as_it_is(line, free))
    if found.taken is None or found.keeps:
        return made
    written = found.taken.write()
    on_pairs = (_ON_PAIRS,) if FLAG in written.added else ()
    return replace(
        made,
        remarks=(*remarks, *_on_loading(parsed, found.taken.candidate), *on_pairs),
        written=written,
        of_stock=NOTHING if found.stock is None else found.stock.write(),
        command="" if request.launch is None else command_with(request.launch, written),
    )


def refusal_of(request: LaunchRequest, parsed: ParsedLaunch, one: Alternative) -> str | None:
    """Return the reason why a training by the command for ``one`` would be refused, if it would:
    by Megatron's validation of arguments and model, or by ours."""
    from megatron_ext.adapter.arguments import check, prove_without_search
    from megatron_ext.doctor import line as launch_line

    if request.launch is None:
        return None
    words = read_launch(shlex.split(command_with(request.launch, one.write()))).arguments
    config = from_argv(words)
    try:
        args = launch_line.parse(words).args
        args = launch_line.validate(args, config, parsed.variants.world_size)
        launch_line.check_model(args, config)
        if config.schedule is not None:
            check(args, config, prove_without_search)
    except ValueError as error:
        return str(error)
    return None


class _Pool:
    """Alternatives to the command of ``parsed``, all with seconds that compare."""

    def __init__(self, parsed: ParsedLaunch) -> None:
        from megatron_ext.launch_planner.alternatives.layouts import own_layout, work_of

        self._parsed, self._line = parsed, parsed.variants
        self._baseline = own_layout(parsed.validated, str(self._line.own))
        work = work_of(parsed.validated, self._line.config)
        self._seconds_beside = work.seconds_beside

    def with_seconds(self, made: Candidate, write: Callable[[], Written]) -> Alternative:
        """``made``, with what comes on top of its passes where the model is known."""
        beside = max(map(self._seconds_beside, made.variant.model or ()), default=0.0)
        return Alternative(made, made.step + beside, write)

    def of(self, changed: Changed) -> list[Alternative]:
        """Return the alternatives of ``changed``, with the layouts that it needs."""
        from megatron_ext.launch_planner.alternatives.written import (
            layout_of_variant,
            written_for,
        )

        def write(made: Candidate) -> Written:
            layout, costs = layout_of_variant(changed.line, made), self._parsed.costs
            written = written_for(self._line.args, self._baseline, made, layout, costs)
            return replace(written, dropped=(*written.dropped, *changed.dropped))

        return [self.with_seconds(made, partial(write, made)) for made in changed.candidates]

    def of_layouts(self, lines: Lines) -> list[Alternative]:
        """Return the alternatives with other layouts that fit into the memory of a rank."""
        from megatron_ext.launch_planner.alternatives.layouts import written_of

        free, costs = self._parsed.room, self._parsed.costs
        return [
            Alternative(
                made.candidate,
                made.seconds,
                partial(written_of, self._line, lines.own, made, costs),
                made.layout.text(),
            )
            for made in dict.fromkeys(lines.others.values())
            if made is not lines.own and (free is None or made.fullest <= free)
        ]


def _baseline(parsed: ParsedLaunch, plan: Plan) -> Candidate | None:
    """The command as it stands, though it may not fit; None if nothing is known of that."""
    extras = parsed.variants.config.extras
    asked = (
        parsed.variants.own,
        VocabMethod.NAIVE,
        extras.activation_offload,
        str(extras.recompute),
    )
    for candidate in plan.candidates:
        made = candidate.report
        if (made.schedule, candidate.method, made.offload, made.recompute) == asked:
            return candidate
    return parsed.variants.as_it_stands()


def _layouts(parsed: ParsedLaunch) -> Lines | None:
    """Compare other layouts; None if nothing is known of single layers."""
    from megatron_ext.launch_planner.alternatives.layouts import lay_out

    line = parsed.variants
    if not line.config.costs.is_estimate:
        return None
    assert line.own is not None
    try:
        return lay_out(
            line,
            parsed.validated,
            line.own,
            parsed.room,
            tries_recompute=parsed.measured is None,
        )
    except ValueError:  # the line itself cannot be trained, as its own row says
        return None


def _long_sequences(parsed: ParsedLaunch, plan: Plan) -> LongSequences | None:
    from megatron_ext.launch_planner.alternatives.long_sequences import long_sequences

    return long_sequences(parsed, plan)


def _on_barred(lines: Lines | None) -> Iterator[str]:
    """Name the better schedule that a refusal of ours bars, if there is one."""
    if lines is None or lines.barred is None:
        return
    spec, more = lines.barred.schedule, 1 - lines.barred.seconds / lines.ours.seconds
    if more >= WORTH:
        why = lines.refused.get(spec, "")
        yield f"{spec} would save {more:.1%} more of a step, and is refused: {why}"


def _what_slices_would(made: LongSequences | None) -> Iterator[str]:
    """Name the flags of slices, if the launch fits only with these."""
    if made is not None and made.best is not None and made.best.fullest is not None:
        fullest = bytes_text(made.best.fullest)
        flags = shlex.join(made.written.added)
        yield f"{flags}: the fullest rank would take {fullest}, which fits"


def _on_loading(parsed: ParsedLaunch, taken: Candidate) -> Iterator[str]:
    """Whether the line's checkpoint can be loaded under what is taken."""
    from megatron_ext.compile.registry import choose
    from megatron_ext.launch_planner.loading import on_loading

    args, own = parsed.validated, str(parsed.variants.own)
    if args.load is None or taken.schedule == own:
        return
    ranks = args.pipeline_model_parallel_size
    before, after = (choose(spec).place(ranks).rank_of for spec in (own, taken.schedule))
    divided = taken.method.vocabulary.value != "none"
    yield on_loading(args, stages_move=before != after or divided)


def _why_not_as_it_is(line: LineVariants, free: float | None) -> str:
    """Why the schedule of the line cannot be taken without more, if that is why."""
    assert line.own is not None
    try:
        variant = line.variant(line.own, VocabMethod.NAIVE)
        assert variant is not None
        consider(replace(variant, may_recompute=False), VocabMethod.NAIVE, free)
    except ValueError as error:
        return str(error)
    return ""
