"""A launch command under other schedules: the problem of each, and its flags.

Under another schedule the same launch has other stages, other costs and other flags. A plan should
simulate exactly what the launch would then train, so each problem comes from the launch's validated
arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.adapter import model_bytes
from megatron_ext.adapter.arguments import check_settings, problems, settle_vocabulary
from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.handled_settings.microbatch_groups import with_megatrons_group
from megatron_ext.adapter.slices.lengths import lengths_in
from megatron_ext.adapter.stock.stock_settings import stock_executor
from megatron_ext.compile.registry import Maturity, entry_of
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.judgement import Judgement, check_arguments, judged
from megatron_ext.launch.planner.stage_arguments import rewritten, with_chunks
from megatron_ext.planner.candidate import Candidate, Variant, VocabMethod
from megatron_ext.planner.figures import flags_of
from megatron_ext.planner.stock import run_by_stock
from megatron_ext.planner.verdict import Written
from megatron_ext.schedule.problem import Recompute, VocabularyParallel
from megatron_ext.schedule.slices import Slices

STABLE = frozenset([Maturity.STABLE])


@dataclass(frozen=True)
class LaunchVariants:
    """Problems of the schedules under which a launch command could train.

    Attributes:
        args: Megatron's arguments, parsed but not validated.
        world_size: ranks of the launch.
        methods: permitted treatments of the vocabulary.
        tokens: number of tokens in the vocabulary; None if not known.
        launch_schedule: the schedule of the unchanged launch. If ``config`` names no schedule, this
            is Megatron's own, which may then have settings that our schedules refuse. None checks
            every schedule.
        maturities: maturities that schedules may have.
        tries_recompute: whether ``--pipeline-recompute`` may be added.
        describes_training: whether ``args`` describe a whole training, and not a model alone.
    """

    args: Any
    config: PipelineConfig
    world_size: int
    methods: frozenset[VocabMethod]
    tokens: int | None
    launch_schedule: str | None = None
    maturities: frozenset[Maturity] = STABLE
    tries_recompute: bool = False
    describes_training: bool = True

    def variant(self, name: str, method: VocabMethod) -> Variant | None:
        """Return the problem of the launch under the schedule ``name``.

        Return None if the schedule is not permitted. The problem is that of the steps with the most
        samples. The schedule's maturity, or the ``method`` of treating the vocabulary, may not be
        permitted.

        Raises:
            ValueError: Megatron or we refuse the schedule with these arguments.
        """
        if method not in self.methods or entry_of(name).maturity not in self.maturities:
            return None
        spec = with_chunks(self.args, name)
        args, config = self.validated(spec, method)
        is_cut = config.slices > 1
        is_stock = self.config.schedule is None and spec == self.launch_schedule
        if not is_stock or method is not VocabMethod.NAIVE or is_cut:
            check_settings(args, config)
        # The settings for Megatron's own schedule are read before the validation, which changes
        # flags.
        stock = stock_executor(self.args)
        problem = run_by_stock(problems(args, config)[0], spec, stock)
        if is_cut:
            # `lengths_in` raises ValueError if the sequence cannot be cut into slices.
            lengths_in(problem, args, args.seq_length)
        model = None
        if problem.costs.held_bytes is not None:
            model = model_bytes.model_bytes_of_ranks(args, problem.placement, method.vocabulary)
        resolved = with_megatrons_group(config.resolved_spec, args)
        return Variant(
            resolved,
            problem,
            model,
            self._may_recompute(args, config),
            in_seconds=config.costs.in_seconds,
        )

    def checked(self) -> Any:
        """Return the validated arguments of the unchanged launch.

        Raises:
            ValueError: the launch cannot run under any schedule.
        """
        args = copy.deepcopy(self.args)
        try:
            with megatron_arguments.one_connection(args):
                check_arguments(
                    args,
                    self.config,
                    self.world_size,
                    self.tokens,
                    describes_training=self.describes_training,
                )
        except ValueError:
            self.judgement()  # raises the first error with which the launch would end
            raise
        return args

    def judgement(self) -> Judgement:
        """Return the judgement of the unchanged launch, which may take more memory than there is.

        Raises:
            ValueError: the launch cannot run.
        """
        args = copy.deepcopy(self.args)
        with megatron_arguments.one_connection(args):
            return judged(
                args,
                self.config,
                self.world_size,
                self.tokens,
                describes_training=self.describes_training,
            )

    def with_slices(self, slices: Slices) -> LaunchVariants:
        """Return the launch with sequences that run in ``slices``.

        Raises:
            ValueError: other settings of the launch conflict with slices.
        """
        config = replace(
            self.config,
            slices=slices.count,
            slice_lengths=slices.lengths,
            join_slice_weights=slices.joined_weights,
            # `validated` sets vocabulary parallelism for each method.
            vocab_parallel=VocabularyParallel.NONE,
        )
        return replace(self, config=config)

    def _may_recompute(self, args: Any, config: PipelineConfig) -> bool:
        """Return whether ``--pipeline-recompute fit`` could be added with these settings."""
        options = replace(config.options, recompute=Recompute(fit=True))
        is_given = config.recompute != Recompute()
        if not self.tries_recompute or is_given or options.conflict is not None:
            return False
        try:
            # `check_settings` also checks settings of Megatron's own schedule, if the launch runs
            # under it.
            check_settings(args, config)
            refuse(args, config.resolved_spec, options)
        except ValueError:
            return False
        return True

    def validated(
        self, spec: str, method: VocabMethod, limit: str | None = None
    ) -> tuple[Any, PipelineConfig]:
        """Return the validated arguments and the settings of the launch under ``spec``."""
        limit = limit or self.config.memory_limit
        config = replace(
            self.config, schedule=spec, vocab_parallel=method.vocabulary, memory_limit=limit
        )
        args = rewritten(self.args, spec).args
        # A launch without tensor and context parallelism need not have set
        # CUDA_DEVICE_MAX_CONNECTIONS.
        with megatron_arguments.one_connection(args):
            megatron_arguments.validate(args, config, self.world_size)
        settle_vocabulary(args, config, self.tokens)
        return args, config

    def written(self, made: Candidate) -> Written:
        """Return the flags that make the launch train under ``made``."""
        changed = rewritten(self.args, made.schedule)
        return Written((*flags_of(made), *changed.added), changed.dropped)

    def with_values(self, values: Mapping[str, Any]) -> LaunchVariants:
        """Return the launch with other ``values`` of arguments, and more ranks if needed."""
        args = copy.deepcopy(self.args)
        for name, value in values.items():
            setattr(args, name, value)
        ranks = max(self.world_size, megatron_arguments.least_world_size(args))
        return replace(self, args=args, world_size=ranks)
