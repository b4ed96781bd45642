"""A launch command as a training job: all ways to train it, and the flags for each.

The planner knows jobs and candidates, and nothing of commands. This module answers its questions
for a launch: what the launch runs now, what else it could run, whether Megatron and we would accept
that, and what to write for it.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from megatron_ext.adapter.arguments import settle_vocabulary
from megatron_ext.adapter.checkpoints.folder import loading_flag
from megatron_ext.adapter.dimensions import execution, hidden_in_pairs
from megatron_ext.adapter.pairs.overlap_setting import FLAG
from megatron_ext.adapter.step_sizes import main_size
from megatron_ext.base.words import bytes_text
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.judgement import Judgement, judged
from megatron_ext.launch.planner.alternatives.changed import Changed
from megatron_ext.launch.planner.alternatives.first_answer import first_answer, is_long, whole_plan
from megatron_ext.launch.planner.alternatives.layouts import lay_out, own_layout, written_of
from megatron_ext.launch.planner.alternatives.less_memory import what_would_fit
from megatron_ext.launch.planner.alternatives.long_sequences import (
    long_sequences_of_launch,
    written_with_slices,
)
from megatron_ext.launch.planner.alternatives.pairs import other_pairs
from megatron_ext.launch.planner.alternatives.vocabularies import on_assumed_vocabulary
from megatron_ext.launch.planner.alternatives.without_full_recompute import (
    without_full_recompute,
)
from megatron_ext.launch.planner.alternatives.written import (
    alternative_of,
    layout_of_variant,
    written_for,
)
from megatron_ext.launch.planner.command_line import arguments_with, command_with
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, ParsedLaunch
from megatron_ext.launch.planner.recipe_changes import RecipeChanges
from megatron_ext.planner.candidate import Candidate, Plan, Variant, VocabMethod
from megatron_ext.planner.confirmation import without_idle_limit
from megatron_ext.planner.job_plan import Others, PlannedJob
from megatron_ext.planner.layouts.comparison import LayoutComparison
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.long_sequences import LongSequences
from megatron_ext.planner.planning_time import (
    LAYOUTS,
    PAIRS,
    RECOMPUTE,
    SLICES,
    start_planning_time,
    until_end,
    within,
)
from megatron_ext.planner.verdict import NOTHING, WORTH, Alternative, Verdict, Written
from megatron_ext.schedule.microbatch_costs import BatchSize
from megatron_ext.written_settings import from_argv

# Shares of the planning time after which the comparison of schedules, of layouts and of other
# changes ends. In the remaining time whole programs of the best alternatives are built.
_SCHEDULES, _LAYOUTS, _CHANGES = 0.5, 0.75, 0.9


def launch_job_of(request: LaunchRequest, parsed: ParsedLaunch) -> LaunchJob:
    """Return the launch of ``request``, already ``parsed``, as a job to be planned."""
    return LaunchJob(
        request=request,
        parsed=parsed,
        text=f"{parsed.facts}, under {parsed.variants.launch_schedule}",
        free=parsed.free,
        has_pipeline=parsed.has_pipeline,
        is_estimate=parsed.measured is None and parsed.variants.config.costs.is_estimate,
        in_seconds=parsed.variants.config.costs.in_seconds,
        batch=_batch(parsed),
        remarks=parsed.remarks,
    )


@dataclass(frozen=True, kw_only=True)
class LaunchJob(PlannedJob):
    """Training of a launch command as the planner sees it: its schedules, layouts and flags."""

    request: LaunchRequest
    parsed: ParsedLaunch

    def variant(self, spec: str, method: VocabMethod) -> Variant | None:
        return self.parsed.variants.variant(spec, method)

    def compare(self) -> Plan:
        start_planning_time()
        first = first_answer(self.parsed)
        with within(_SCHEDULES):
            return whole_plan(self.parsed, first)

    def baseline(self, plan: Plan) -> Alternative | None:
        try:
            return judged_alternative(self._own_judgement, lambda: NOTHING)
        except ValueError:
            return None

    @cached_property
    def _own_judgement(self) -> Judgement:
        return self.parsed.variants.judgement()

    def alternative(self, made: Candidate) -> Alternative:
        return self._changed(made, Changed(self.parsed.variants, ()))

    def others(self, plan: Plan) -> Others:
        variants, allowed_bytes = self.parsed.variants, self.allowed_bytes
        long = is_long(self.parsed.validated)
        with within(_LAYOUTS):
            layouts = until_end(partial(_layouts, self.parsed), None, LAYOUTS)
        changes: list[Changed | None] = []
        with within(_CHANGES):
            if self.is_estimate:
                in_pairs = partial(other_pairs, variants, plan, allowed_bytes, is_long=long)
                less = partial(without_full_recompute, variants, plan, allowed_bytes)
                changes.append(until_end(less, None, RECOMPUTE))
                changes.append(until_end(in_pairs, None, PAIRS))
            slices = until_end(partial(long_sequences_of_launch, self.parsed, plan), None, SLICES)
        made = [
            self._changed(candidate, changed)
            for changed in changes
            if changed is not None
            for candidate in changed.candidates
        ]
        made += [] if layouts is None else self._laid_out(layouts)
        for one in () if slices is None else slices.tied:
            made.append(self._alternative(one, partial(written_with_slices, self.parsed, one)))
        return Others(tuple(made), slices, tuple(_on_not_permitted(layouts)))

    def judged(self, one: Alternative) -> Alternative:
        if one.write() == NOTHING:  # the launch's own settings were judged before
            return one
        if self.parsed.variants.config.memory_limit is None:
            one = without_idle_limit(one)
        made = judgement_of(self.request, self.parsed, one.write())
        return replace(judged_alternative(made, one.write), layout=one.layout)

    def refusal_of(self, written: Written) -> str | None:
        return refusal_of(self.request, self.parsed, written)

    def why_not(self, plan: Plan) -> str:
        try:
            _ = self._own_judgement
        except ValueError as error:
            return str(error)
        return ""

    def fallbacks(self, others: Others) -> tuple[str, ...]:
        variants, none = self.parsed.variants, tuple[str, ...]()
        fitting = until_end(lambda: tuple(what_would_fit(variants, self.allowed_bytes)), none)
        return *_what_slices_would(others.long_sequences), *fitting

    def command(self, written: Written) -> str:
        launch = self.request.launch
        return "" if launch is None else command_with(launch, written)

    def on_assumed(self, found: Verdict) -> str:
        if not self.parsed.assumes_tokens:
            return ""
        return on_assumed_vocabulary(self.parsed, found, self._judged_with)

    def _judged_with(self, parsed: ParsedLaunch, one: Alternative) -> Alternative:
        """Return the alternative ``one`` with its time and memory under the launch ``parsed``."""
        made = judgement_of(self.request, parsed, one.write())
        return judged_alternative(made, one.write)

    def remarks_on(self, taken: Candidate, written: Written) -> tuple[str, ...]:
        on_loaded = on_loading(self.request, self.parsed, written)
        return *on_loaded, *([_on_pairs(self.parsed)] if FLAG in written.added else [])

    def _alternative(self, made: Candidate, write: Callable[[], Written]) -> Alternative:
        return alternative_of(self.parsed.validated, made, write)

    def _changed(self, made: Candidate, changed: Changed) -> Alternative:
        """Return the candidate ``made`` of a ``changed`` command as an alternative, with flags.

        The flags include those of the layout that it needs.
        """

        def write() -> Written:
            layout, costs = layout_of_variant(changed.variants, made), self.parsed.costs
            args, baseline = self.parsed.variants.args, self._own_layout
            written = written_for(args, baseline, made, layout, costs)
            return replace(written, dropped=(*written.dropped, *changed.dropped))

        return self._alternative(made, write)

    @property
    def _own_layout(self) -> tuple[str, Layout]:
        return own_layout(self.parsed.validated, str(self.parsed.variants.launch_schedule))

    def _laid_out(self, layouts: LayoutComparison) -> list[Alternative]:
        """Return the alternatives with other layouts that fit into the memory of a rank."""
        allowed_bytes, costs = self.allowed_bytes, self.parsed.costs
        return [
            Alternative(
                made.candidate,
                made.seconds,
                partial(written_of, self.parsed.variants, layouts.baseline, made, costs),
                made.layout.text(),
            )
            for made in dict.fromkeys(layouts.others.values())
            if made is not layouts.baseline
            and (allowed_bytes is None or made.fullest <= allowed_bytes)
        ]


def _batch(parsed: ParsedLaunch) -> BatchSize:
    args = parsed.validated
    return BatchSize(
        main_size(args).microbatches,
        args.data_parallel_size,
        args.micro_batch_size,
        args.seq_length if parsed.variants.config.costs.is_estimate else None,
        is_padded=True,
        expert_replicas=execution(args, args.seq_length, args.micro_batch_size).expert_replicas,
    )


def judged_alternative(made: Judgement, write: Callable[[], Written]) -> Alternative:
    """Return the judged command ``made`` as an alternative that plans compare.

    ``write`` makes its flags, in addition to those of the launch.
    """
    figures = alternative_of(made.args, made.candidate(), write)
    outside = figures.seconds - figures.candidate.step
    others = {
        program.problem.microbatches: step_seconds(program, program.problem.costs) + outside
        for program in made.programs[1:]
    }
    return replace(figures, other_steps=others)


def judgement_of(request: LaunchRequest, parsed: ParsedLaunch, written: Written) -> Judgement:
    """Return the judgement of the launch with the changes ``written``.

    Raises:
        ValueError: Megatron or we would refuse such a training.
    """
    args, config, recipe = _command_with(request, parsed, written)
    variants = parsed.variants
    # Doctor, not plan, remarks on CUDA_DEVICE_MAX_CONNECTIONS.
    with megatron_arguments.one_connection(args):
        return judged(
            args,
            config,
            variants.world_size,
            variants.tokens,
            None if recipe is None else recipe.check,
            describes_training=variants.describes_training,
        )


def _command_with(
    request: LaunchRequest, parsed: ParsedLaunch, written: Written
) -> tuple[Any, PipelineConfig, RecipeChanges | None]:
    """Return arguments, settings and recipe of the launch with the changes ``written``."""
    variants, recipe = parsed.variants, None
    if request.launch is None:
        words, args = written.words, _args_with(variants.args, written)
    else:
        words = arguments_with(request.launch, written)
        args = megatron_arguments.parse_arguments(words).args
        if request.launch.recipe is not None:
            recipe = RecipeChanges(request.launch.recipe, written, words)
    vars(args).update(parsed.untold)
    # Costs and rank speeds may come from the options of plan or from a trace.
    ours = variants.config
    config = replace(from_argv(words), costs=ours.costs, rank_speeds=ours.rank_speeds)
    return args, config, recipe


def refusal_of(request: LaunchRequest, parsed: ParsedLaunch, written: Written) -> str | None:
    """Return why the launch with the changes ``written`` would be refused; None if it would not."""
    try:
        if written != NOTHING:
            judgement_of(request, parsed, written)
    except ValueError as error:
        return str(error)
    return None


def _args_with(args: Any, written: Written) -> Any:
    """Return Megatron's arguments ``args``, which a file gives, with the changes ``written``."""
    changed, options = copy.deepcopy(args), megatron_arguments.parser()._option_string_actions
    given = megatron_arguments.parse_arguments(written.added).args
    for flag in written.dropped:
        setattr(changed, options[flag].dest, options[flag].default)
    for name in {options[word].dest for word in written.added if word in options}:
        setattr(changed, name, getattr(given, name))
    return changed


def _layouts(parsed: ParsedLaunch) -> LayoutComparison | None:
    """Compare other layouts of layers; None if costs of single layers are not known."""
    variants = parsed.variants
    if not variants.config.costs.is_estimate:
        return None
    assert variants.launch_schedule is not None
    try:
        return lay_out(
            variants,
            parsed.validated,
            variants.launch_schedule,
            parsed.allowed_bytes,
            tries_recompute=parsed.measured is None,
        )
    except ValueError:  # the launch command itself cannot train, and its row in the plan says why
        return None


def _on_not_permitted(layouts: LayoutComparison | None) -> Iterator[str]:
    """Yield a remark on a better schedule that the launch refuses, if there is one."""
    if layouts is None or layouts.best_not_permitted is None:
        return
    better = layouts.best_not_permitted
    spec, more = better.schedule, 1 - better.seconds / layouts.ours.seconds
    if more >= WORTH:
        why = layouts.refused.get(spec, "")
        yield f"{spec} would save {more:.1%} more of a step, and is refused: {why}"


def _what_slices_would(made: LongSequences | None) -> Iterator[str]:
    """Yield the flags of slices of sequences, if the launch fits into memory only with these."""
    if made is not None and made.best is not None and made.best.fullest is not None:
        fullest = bytes_text(made.best.fullest)
        flags = shlex.join(made.written.added)
        yield f"{flags}: the fullest rank would take {fullest}, which fits"


def _on_pairs(parsed: ParsedLaunch) -> str:
    rates = None if parsed.measured is None else parsed.measured.rates
    share = hidden_in_pairs(parsed.validated, rates)
    return (
        f"{FLAG}: that {share} of the time of experts' messages is hidden so is assumed; "
        f"what is published differs threefold, and no GPU has run our pairs"
    )


def on_loading(request: LaunchRequest, parsed: ParsedLaunch, written: Written) -> Iterator[str]:
    """Yield a remark on whether the launch with the changes ``written`` loads its checkpoint."""
    variants, flag = parsed.variants, loading_flag(parsed.validated)
    if flag is None:
        return
    args, config, _ = _command_with(request, parsed, written)
    if config.is_chosen_later:
        config = replace(config, schedule=str(variants.launch_schedule))
    with megatron_arguments.one_connection(args):
        args = megatron_arguments.validate(args, config, variants.world_size)
    # A checkpoint is not judged by an assumed vocabulary size.
    settle_vocabulary(args, config, None if parsed.assumes_tokens else variants.tokens)
    yield str(megatron_arguments.judge_checkpoint(args, config, flag))
