"""``--pipeline-schedule plan`` and ``auto``: which schedule a launch line takes, told before it is
launched. ``auto`` chooses among the searches of all placements, and leaves the vocabulary alone.

Patches depend on the schedule, and Megatron builds the model for it, so the choice comes first:
from the arguments and the GPU's memory alone, which all ranks share, so that all come to the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ext.adapter.arguments import check, search_for_first
from megatron_ext.compile.auto_spec import auto_searches
from megatron_ext.compile.registry import choose, entry_of
from megatron_ext.config import PLAN, PipelineConfig, flag
from megatron_ext.cost_model.gpus import FreeMemory, free_memory
from megatron_ext.cost_model.measured.file import load_measured
from megatron_ext.doctor import line as launch_line
from megatron_ext.doctor.importing import silently
from megatron_ext.launch import Chosen
from megatron_ext.launch_planner.variants import (
    LineVariants,
    chunks_of,
    names_stages,
    stock_schedule,
)
from megatron_ext.planner.auto import AS_1F1B, left_out, nothing_left
from megatron_ext.planner.candidate import Candidate, Plan, Variant, VocabMethod
from megatron_ext.planner.figures import flags_of, made_again
from megatron_ext.planner.fitting import consider
from megatron_ext.planner.planner import make_plan, without_figures
from megatron_ext.planner.verdict import (
    ALIKE,
    NOTHING,
    WORTH,
    Alternative,
    Verdict,
    is_stock,
    shortest_of_others,
    verdict,
)
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.words import bytes_text, counted
from megatron_ext.written_settings import says

# Switches of Megatron's that some schedules refuse and that are about speed alone: without them the
# same is trained.
FOR_SPEED = (
    "fp8_output_proj",
    "moe_single_grouped_bias",
    "moe_single_grouped_weight",
    "use_grouped_gemm_for_shared_expert",
    "use_transformer_engine_op_fuser",
)
WORTH_A_WORD = 0.005  # of a step


def choose_for(
    argv: Sequence[str],
    config: PipelineConfig,
    world_size: int,
    gpu_memory: float | None = None,
) -> Chosen:
    """Return the schedule for the launch command with the arguments ``argv``: Megatron's own as it
    is there, or a stable one, or one that an ``auto`` leaves open, by the rules of `verdict`.

    A rank is given no more memory than the line takes as it is on the fullest rank, unless
    ``config`` has a memory limit; and no more than `free_memory` of a GPU, if any schedule fits.

    Args:
        world_size: ranks of the launch.
        gpu_memory: bytes of a GPU; None: of the one that is here, if one is.

    Raises:
        ValueError: no schedule can run so.
    """
    line = launch_line.parse(argv)
    if line.args.yaml_cfg is not None or line.args.use_checkpoint_args:
        raise ValueError(
            f"{flag('schedule')} {config.schedule} chooses from the launch line, and --yaml-cfg or "
            f"--use-checkpoint-args bring other arguments: name a schedule"
        )
    is_plan = config.schedule == PLAN
    given = not is_plan or says(argv, "vocab_parallel")
    methods = {VocabMethod.NAIVE, VocabMethod.ONE, VocabMethod.TWO}
    if given:
        methods = {method for method in methods if method.vocabulary is config.vocab_parallel}
    with silently():  # what Megatron says it will say again
        tokens = launch_line.count_tokens(line.args)
        if not given and tokens is None and line.args.padded_vocab_size is None:
            methods &= {VocabMethod.NAIVE}  # whether dividing it is worth while cannot be told
        variants = LineVariants(
            line.args,
            config,
            world_size,
            frozenset(methods),
            tokens,
            tries_recompute=is_plan and not says(argv, "recompute"),
        )
        own = stock_schedule(line.args)
        specs = None if is_plan else (own, *_searches(line.args, config))
        return _Launch(variants, specs).choose(gpu_memory or _memory_here())


def _searches(args: Any, config: PipelineConfig) -> tuple[str, ...]:
    """What an ``auto`` leaves open, with as many chunks as the launch line has, if it has any.

    Raises:
        ValueError: there is none.
    """
    asked = str(config.schedule)
    searches = auto_searches(asked) or ()
    if not names_stages(args):
        return searches
    ranks, chunks = args.pipeline_model_parallel_size, chunks_of(args)
    fitting = tuple(spec for spec in searches if choose(spec).place(ranks).chunks == chunks)
    if not fitting:
        raise ValueError(
            f"{flag('schedule')} {asked} knows no schedule with {counted(chunks, 'stage')} on each "
            f"rank, as the launch line's virtual stages, layout or pattern require: remove them, "
            f"and they are added for what is chosen"
        )
    return fitting


def _memory_here() -> float | None:
    """Bytes of the GPU that is here, down to a GiB: those of a job may differ by a little."""
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory >> 30 << 30)


@dataclass(frozen=True)
class _Bound:
    """What a rank may take.

    Attributes:
        text: says so.
        room: bytes; None: no bound.
        limit: of activations, to be written with any schedule.
        is_written: whether a schedule is to be written with the limit that it was made for.
    """

    text: str
    room: float | None = None
    limit: str | None = None
    is_written: bool = False


@dataclass(frozen=True)
class _Launch:
    line: LineVariants
    specs: tuple[str, ...] | None = None  # to choose from; None: all

    @property
    def config(self) -> PipelineConfig:
        return self.line.config

    @property
    def own(self) -> str:
        """Megatron's own schedule with the stages that the line asks for."""
        return stock_schedule(self.line.args)

    def choose(self, gpu_memory: float | None) -> Chosen:
        """Within the first of `_bounds` that leaves anything."""
        whys: dict[str, None] = {}
        for bound in self._bounds(gpu_memory):
            launch = self
            if bound.limit is not None:
                config = replace(self.config, memory_limit=bound.limit)
                launch = replace(self, line=replace(self.line, config=config))
            plan = make_plan(launch.line.variant, bound.room, only_promising=True, specs=self.specs)
            found = launch.found_in(plan, bound)
            if found is not None and found.taken is not None:
                candidate = found.taken.candidate
                why = self._reason(found, plan, bound.text)
                why += launch.what_flags_hide(candidate, plan, bound)
                rewritten = self.line.rewritten(candidate.schedule)
                flags = (*_flags(candidate, bound), *rewritten.added)
                return Chosen(flags, why, rewritten.dropped)
            whys |= dict.fromkeys(
                map(without_figures, plan.refusals.values())
                if self.specs is None
                else [nothing_left(plan)]
            )
        raise ValueError(
            f"{flag('schedule')} {self.config.schedule} finds no schedule {bound.text}: "
            f"{'; '.join(whys)}"
        )

    def _bounds(self, gpu_memory: float | None) -> Iterator[_Bound]:
        usable, on_gpu, too_large = None, "", ""
        if gpu_memory is not None:
            free = free_memory(gpu_memory, self._measured_reserve())
            usable, on_gpu = free.allocated, _on_gpu(free, gpu_memory)
            too_large = f"; a GPU has {bytes_text(gpu_memory)}, and none is predicted to fit"
        if self.config.memory_limit is not None:
            text = f"within {flag('memory_limit')} {self.config.memory_limit}"
            if usable is None:
                yield _Bound(text)
            else:
                yield _Bound(f"{text} and {on_gpu}", usable)
                yield _Bound(text + too_large)
            return
        text, own = f"in no more memory than {self.own}", self._as_it_is()
        of_own = None if own is None else own.fullest
        if of_own is None:
            is_more = own is not None and own.report.peak > own.report.pp
            limit = (
                MemoryLimit(microbatches=own.report.peak).written if own and is_more else AS_1F1B
            )
            yield _Bound(text, usable, limit)
        elif usable is None or of_own <= usable:
            yield _Bound(text, of_own, is_written=True)
        else:
            yield _Bound(on_gpu, usable, is_written=True)
            yield _Bound(text + too_large, of_own, is_written=True)

    def _measured_reserve(self) -> float | None:
        """Bytes that an allocator reserved beyond its allocations; None: not measured."""
        file = self.config.costs.file
        measured = None if file is None else load_measured(file)
        return None if measured is None else measured.reserved

    def _as_it_is(self) -> Candidate | None:
        """Megatron's own schedule, whatever it takes; None if it cannot run."""
        try:
            line = replace(self.line, methods=frozenset([VocabMethod.NAIVE]))
            variant = line.variant(self.own, VocabMethod.NAIVE)
            return None if variant is None else consider(variant, VocabMethod.NAIVE)
        except ValueError:
            return None

    def found_in(self, plan: Plan, bound: _Bound) -> Verdict | None:
        """The verdict among those of ``plan`` that a rank would not refuse: Transformer Engine may
        refuse an order, and steps of other batch sizes may not be possible."""
        pool = list(plan.candidates)
        while pool:
            own = next((one for one in pool if self._is_own(one)), None)
            others = [_alternative(one) for one in pool if one is not own]
            found = verdict(None if own is None else _alternative(own), others)
            assert found.taken is not None
            if self._starts(found.taken.candidate, bound):
                return found
            pool.remove(found.taken.candidate)
        return None

    def _is_own(self, candidate: Candidate) -> bool:
        return candidate.schedule == self.own and is_stock(candidate)

    def _starts(self, candidate: Candidate, bound: _Bound) -> bool:
        limit = candidate.limit if bound.is_written else None
        written = None if limit is None else limit.written
        try:
            args, config = self.line.validated(candidate.schedule, candidate.method, written)
            check(args, replace(config, recompute=candidate.recompute), search_for_first)
        except ValueError:
            return False
        return True

    def _reason(self, found: Verdict, plan: Plan, within: str) -> str:
        """Why the verdict is taken, in one line."""
        assert found.taken is not None
        taken, compared = found.taken.candidate, counted(len(plan.best_of_each), "schedule")
        if found.keeps:
            text = f"it is kept: of {compared} {within} none saves {WORTH:.0%} of a step"
            text += shortest_of_others(found)
        else:
            text = f"the best of {compared} {within}"
            if found.baseline is not None:
                text = f"a step {found.gain:.1%} shorter than {self.own}'s, {text}"
            text += made_again(taken)
            tie = dict.fromkeys(one.candidate.schedule for one in found.tie)
            if tie:
                text += f"; {', '.join(tie)} as long within {ALIKE:.0%}, in no less memory"
        is_told = self.specs is not None and plan.refusals
        return f"{text}; not compared: {left_out(plan)}" if is_told else text

    def what_flags_hide(self, taken: Candidate, plan: Plan, bound: _Bound) -> str:
        """A better choice that is refused for flags which are about speed alone, in words."""
        given = [name for name in FOR_SPEED if getattr(self.line.args, name, False)]
        if not given:
            return ""
        without = self._without(given)

        def variant(name: str, method: VocabMethod) -> Variant | None:
            refused = (name, method) in plan.refusals and not entry_of(name).traits.searches
            return without.line.variant(name, method) if refused else None

        others = make_plan(variant, bound.room, True, better_than=taken, specs=self.specs)
        found = without.found_in(others, bound)
        better = None if found is None or found.taken is None else found.taken.candidate
        if better is None or better.step > (1 - WORTH_A_WORD) * taken.step:
            return ""
        needed = [
            f"--{name.replace('_', '-')}"
            for name in given
            if self._without([other for other in given if other != name]).refuses(better)
        ]
        words = shlex.join(_flags(better, bound)[1:])
        bubbles = [f"{c.report.bubble_share_makespan:.1%}" for c in (better, taken)]
        return (
            f". Without {' and '.join(needed)}: {words}, a step {1 - better.step / taken.step:.1%} "
            f"shorter (bubble {bubbles[0]}, not {bubbles[1]}; what the flag itself saves is not "
            f"counted)"
        )

    def _without(self, names: Sequence[str]) -> _Launch:
        """This launch without the switches ``names``."""
        return _Launch(self.line.with_values(dict.fromkeys(names, False)))

    def refuses(self, candidate: Candidate) -> bool:
        try:
            self.line.variant(candidate.family, candidate.method)
        except ValueError:
            return True
        return False


def _flags(candidate: Candidate, bound: _Bound) -> tuple[str, ...]:
    """What to write for ``candidate``. A limit of the user's is on the line already."""
    words = flags_of(candidate if bound.is_written else replace(candidate, limit=None))
    return words if bound.limit is None else (*words, flag("memory_limit"), bound.limit)


def _on_gpu(free: FreeMemory, memory: float) -> str:
    by = "a model of it" if free.is_modelled else "measurement"
    return (
        f"in {bytes_text(free.allocated)} of a GPU's {bytes_text(memory)}, in addition to which "
        f"its allocator reserves {bytes_text(free.reserved)} by {by}"
    )


def _alternative(candidate: Candidate) -> Alternative:
    return Alternative(candidate, candidate.step, lambda: NOTHING)
