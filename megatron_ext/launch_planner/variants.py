"""A launch command under other schedules: the problem of each, and its flags."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.adapter import model_bytes
from megatron_ext.adapter.arguments import check_settings, problems
from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.layers import (
    SEGMENT_END,
    even_layout,
    evenly,
    layers_of_stages,
    pattern_segments,
    prediction_depths,
)
from megatron_ext.adapter.layout_arguments import (
    CHUNKS,
    ENDS,
    LAYERS_OF_CHUNK,
    LAYOUT,
    PATTERN,
    VIRTUAL_STAGES,
)
from megatron_ext.adapter.slices.lengths import lengths_in
from megatron_ext.compile.registry import Mark, choose, entry_of
from megatron_ext.config import PipelineConfig
from megatron_ext.launch_command import megatron_arguments
from megatron_ext.planner.candidate import Candidate, Variant, VocabMethod
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.fitting import consider
from megatron_ext.planner.verdict import Written
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Recompute, VocabularyParallel
from megatron_ext.schedule.slices import Slices

STABLE = frozenset([Mark.STABLE])


@dataclass(frozen=True)
class Rewritten:
    """Changes of a launch command for a schedule, in addition to our flags.

    Attributes:
        args: arguments of the launch, not validated.
        dropped: Megatron's flags to remove from the command.
        added: words to append to the command.
    """

    args: Any
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchVariants:
    """Problems of the schedules under which a launch command could train.

    Attributes:
        args: parsed, not validated.
        world_size: ranks of the launch.
        methods: permitted treatments of the vocabulary.
        tokens: number of tokens in the vocabulary; None: not known.
        own: the schedule of the unchanged launch; None: it is checked like any other.
        marks: maturity that schedules may have.
        tries_recompute: whether ``--pipeline-recompute`` may be added.
    """

    args: Any
    config: PipelineConfig
    world_size: int
    methods: frozenset[VocabMethod]
    tokens: int | None
    own: str | None = None
    marks: frozenset[Mark] = STABLE
    tries_recompute: bool = False

    def variant(self, name: str, method: VocabMethod) -> Variant | None:
        """Return the problem of the family ``name``, of the steps with the most microbatches; None
        if its maturity or ``method`` is not permitted.

        Raises:
            ValueError: Megatron or we refuse it with these arguments.
        """
        if method not in self.methods or entry_of(name).mark not in self.marks:
            return None
        spec = self.spec(name)
        args, config = self.validated(spec, method)
        is_cut = config.slices > 1
        if spec != self.own or method is not VocabMethod.NAIVE or is_cut:
            check_settings(args, config)
        problem = problems(args, config)[-1]
        if is_cut:
            lengths_in(problem, args, args.seq_length)  # raises ValueError
        model = None
        if problem.costs.held_bytes is not None:
            model = model_bytes.model_bytes_of_ranks(args, problem.placement, method.vocabulary)
        return Variant(config.choice, problem, model, self._may_recompute(args, config))

    def as_it_stands(self) -> Candidate | None:
        """Return the unchanged launch, though it may not fit; None if it cannot run."""
        assert self.own is not None
        try:
            variant = self.variant(self.own, VocabMethod.NAIVE)
            assert variant is not None
            return consider(replace(variant, may_recompute=False), VocabMethod.NAIVE)
        except ValueError:
            return None

    def with_slices(self, slices: Slices) -> LaunchVariants:
        """Return the same with sequences cut into ``slices``.

        Raises:
            ValueError: other settings of the launch do not go with slices.
        """
        config = replace(
            self.config,
            slices=slices.count,
            slice_lengths=slices.lengths,
            vocab_parallel=VocabularyParallel.NONE,  # `validated` sets it by the method
        )
        return replace(self, config=config)

    def _may_recompute(self, args: Any, config: PipelineConfig) -> bool:
        """Return whether a launch with these could add ``--pipeline-recompute fit``."""
        extras = replace(config.extras, recompute=Recompute(fit=True))
        is_given = config.recompute != Recompute()
        if not self.tries_recompute or is_given or extras.conflict is not None:
            return False
        try:
            check_settings(args, config)  # also of the launch's own schedule, if that is Megatron's
            refuse(args, config.choice, extras)
        except ValueError:
            return False
        return True

    def spec(self, name: str) -> str:
        """Return the family ``name``, with the chunks of the launch if it takes any number of
        chunks and ``name`` has none."""
        chunks = chunks_of(self.args)
        takes_any = "vpp" in inspect.signature(entry_of(name).place).parameters
        if chunks > 1 and takes_any and ":" not in name:
            return f"{name}:vpp={chunks}"
        return name

    def validated(
        self, spec: str, method: VocabMethod, limit: str | None = None
    ) -> tuple[Any, PipelineConfig]:
        """Return the validated arguments and the settings of the launch under ``spec``."""
        limit = limit or self.config.memory_limit
        config = replace(
            self.config, schedule=spec, vocab_parallel=method.vocabulary, memory_limit=limit
        )
        args = self.rewritten(spec).args
        # The launch need not have set the variable if it has no tensor or context parallelism.
        with megatron_arguments.one_connection(args):
            megatron_arguments.validate(args, config, self.world_size)
        megatron_arguments.settle_vocabulary(args, config, self.tokens)
        return args, config

    def rewritten(self, spec: str) -> Rewritten:
        """Return the launch under ``spec``. If that has another number of stages, flags of virtual
        stages are dropped, and the layout is replaced by one that is as even as possible."""
        args = copy.deepcopy(self.args)
        placement = choose(spec).place(args.pipeline_model_parallel_size)
        if placement.stages == placement.ranks * chunks_of(args):
            return Rewritten(args)
        dropped = _taken_out(args, (CHUNKS, LAYERS_OF_CHUNK))
        if getattr(args, PATTERN, None) is not None:
            return Rewritten(args, dropped, _cut_pattern(args, placement.stages))
        had_layout = bool(args.pipeline_model_parallel_layout)
        args.pipeline_model_parallel_layout = None
        if not had_layout and _divides(args, placement):
            return Rewritten(args, dropped)
        dropped += _taken_out(args, ENDS)
        layout = even_layout(args.num_layers, placement.stages, prediction_depths(args))
        args.pipeline_model_parallel_layout = layout
        return Rewritten(args, dropped, (_flag(LAYOUT), layout))

    def written(self, made: Candidate) -> Written:
        """Return the flags that make the launch train under ``made``."""
        rewritten = self.rewritten(made.schedule)
        return Written((*flags_of(made), *rewritten.added), rewritten.dropped)

    def with_values(self, values: Mapping[str, Any]) -> LaunchVariants:
        """Return the same with other ``values`` of Megatron's arguments, and with more ranks if
        these need more."""
        args = copy.deepcopy(self.args)
        for name, value in values.items():
            setattr(args, name, value)
        ranks = max(self.world_size, megatron_arguments.least_world_size(args))
        return replace(self, args=args, world_size=ranks)


def _taken_out(args: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Remove those of ``names`` that are set in ``args``, and return their flags."""
    given = [name for name in names if getattr(args, name) is not None]
    for name in given:
        setattr(args, name, None)
    return tuple(map(_flag, given))


def _divides(args: Any, placement: Placement) -> bool:
    try:
        layers_of_stages(args, placement)
    except ValueError:
        return False
    return True


def _cut_pattern(args: Any, stages: int) -> tuple[str, ...]:
    """Cut the pattern of ``args`` into ``stages`` stages, as evenly as possible, unless Megatron
    does so by itself. Return the words for it."""
    pattern: str = args.hybrid_layer_pattern
    main, slash, depths = pattern.partition("/")
    layers = main.replace(SEGMENT_END, "")
    if SEGMENT_END not in pattern and len(layers) % stages == 0:
        return ()
    left = iter(layers)
    segments = ["".join(islice(left, count)) for count in evenly(len(layers), stages)]
    args.hybrid_layer_pattern = SEGMENT_END.join(segments) + slash + depths
    return _flag(PATTERN), args.hybrid_layer_pattern


def names_stages(args: Any) -> bool:
    """Return whether ``args`` say how many chunks a rank has."""
    given = any(getattr(args, name) is not None for name in VIRTUAL_STAGES)
    return given or SEGMENT_END in (getattr(args, PATTERN, None) or "")


def chunks_of(args: Any) -> int:
    """Return the chunks of a rank under ``args``, which are not validated."""
    ranks = args.pipeline_model_parallel_size
    layout, pattern = getattr(args, LAYOUT), getattr(args, PATTERN, None)
    chunks: int | None = getattr(args, CHUNKS)
    of_chunk = getattr(args, LAYERS_OF_CHUNK)
    if layout is not None:
        chunks = len(PipelineParallelLayerLayout.parse_str_to_list(layout)) // ranks
    elif pattern is not None and SEGMENT_END in pattern:
        chunks = len(pattern_segments(pattern)) // ranks
    elif of_chunk is not None:
        chunks = args.num_layers // ranks // of_chunk
    return max(chunks or 1, 1)


def stock_schedule(args: Any) -> str:
    """Return Megatron's own schedule with the chunks of ``args``, which are not validated."""
    chunks = chunks_of(args)
    return "1f1b" if chunks == 1 else f"interleaved:vpp={chunks}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
