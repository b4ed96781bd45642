"""``--pipeline-schedule plan``: which schedule a launch line takes, told before it is launched.

Patches depend on the schedule, and Megatron builds the model for it, so the choice comes first:
from the arguments alone, which all ranks share, so that all come to the same.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.adapter.arguments import (
    check,
    check_settings,
    model_of,
    problems,
)
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.launch_check import line as launch_line
from megatron_ext.schedule.model.model_memory import TrainingState, bytes_of_ranks
from megatron_ext.schedule.plan.planner import (
    Candidate,
    Plan,
    Variant,
    VocabMethod,
    consider,
    make_plan,
)
from megatron_ext.schedule.plan.recommendation import flags_of, slower_by

AS_1F1B = "1x"  # the limit where bytes are not known: what 1F1B holds, in microbatches


@dataclass(frozen=True)
class Chosen:
    """The flags that stand for ``--pipeline-schedule plan``, and why, in a line."""

    flags: tuple[str, ...]
    why: str


def choose_for(argv: Sequence[str], config: PipelineConfig, world_size: int) -> Chosen:
    """What to train under on the launch line with the arguments ``argv``.

    A rank is given no more memory than Megatron's own 1F1B would take on the fullest rank, unless
    ``config`` has a memory limit.

    Args:
        world_size: ranks of the launch.

    Raises:
        ValueError: no schedule can run so.
    """
    line = launch_line.parse(argv)
    if line.args.yaml_cfg is not None or line.args.use_checkpoint_args:
        raise ValueError(
            f"{flag('schedule')} plan chooses from the launch line, and --yaml-cfg or "
            f"--use-checkpoint-args bring other arguments: name a schedule"
        )
    given = any(word.split("=")[0] == flag("vocab_parallel") for word in argv)
    methods = {VocabMethod.NAIVE, VocabMethod.ONE, VocabMethod.TWO}
    if given:
        methods = {method for method in methods if method.vocabulary is config.vocab_parallel}
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Megatron says it will say again
            tokens = launch_line.count_tokens(line.args)
            if not given and tokens is None and line.args.padded_vocab_size is None:
                methods &= {VocabMethod.NAIVE}  # whether dividing it is worth while cannot be told
            return _Launch(line.args, config, world_size, frozenset(methods), tokens).choose()
    finally:
        logging.disable(disabled)


@dataclass(frozen=True)
class _Launch:
    args: Any
    config: PipelineConfig
    world_size: int
    methods: frozenset[VocabMethod]
    tokens: int | None  # of the vocabulary, if it is known

    def choose(self) -> Chosen:
        launch, room = self, None
        limit_flags: tuple[str, ...] = ()
        bound = f"within {flag('memory_limit')} {self.config.memory_limit}"
        if self.config.memory_limit is None:
            room = self._taken_by_1f1b()
            bound = "in no more memory than 1f1b"
            if room is None:
                limit_flags = (flag("memory_limit"), AS_1F1B)
                launch = replace(self, config=replace(self.config, memory_limit=AS_1F1B))
        plan = make_plan(launch.variant, room, only_promising=True)
        for candidate in plan.candidates:
            limit = None if room is None or candidate.limit is None else candidate.limit.written
            try:
                check(*launch._validated(candidate.schedule, candidate.method, limit))
            except ValueError:
                continue  # an order that Transformer Engine refuses, or another batch size
            # A limit of the user's is on the line already.
            flags = flags_of(candidate if limit else replace(candidate, limit=None), None)
            return Chosen((*flags, *limit_flags), _reason(candidate, plan, bound))
        whys = dict.fromkeys(plan.refusals.values())
        raise ValueError(f"{flag('schedule')} plan finds no schedule {bound}: {'; '.join(whys)}")

    def _taken_by_1f1b(self) -> float | None:
        """Bytes of the fullest rank; None if it cannot run, or bytes are not known."""
        try:
            variant = replace(self, methods=frozenset([VocabMethod.NAIVE])).variant(
                "1f1b", VocabMethod.NAIVE
            )
            return None if variant is None else consider(variant, VocabMethod.NAIVE).fullest
        except ValueError:
            return None

    def variant(self, name: str, method: VocabMethod) -> Variant | None:
        """The problem of the family ``name``: that of the most microbatches.

        Raises:
            ValueError: Megatron or we refuse it with these arguments.
        """
        if method not in self.methods:
            return None
        args, config = self._validated(name, method)
        check_settings(args, config)
        problem = problems(args, config)[-1]
        placement = problem.placement
        model = None
        if problem.costs.held_bytes is not None:
            model = bytes_of_ranks(
                model_of(args, placement), placement, method.vocabulary, _state(args)
            )
        return Variant(config.choice, problem, model)

    def _validated(
        self, name: str, method: VocabMethod, limit: str | None = None
    ) -> tuple[Any, PipelineConfig]:
        """Arguments and settings as if the user had named these."""
        limit = limit or self.config.memory_limit
        config = replace(
            self.config, schedule=name, vocab_parallel=method.vocabulary, memory_limit=limit
        )
        args = copy.deepcopy(self.args)
        launch_line.validate(args, config, self.world_size)
        launch_line.settle_vocabulary(args, config, self.tokens)
        return args, config


def _state(args: Any) -> TrainingState:
    return TrainingState(
        tied=not args.untie_embeddings_and_output_weights,
        optimizer_ranks=args.data_parallel_size if args.use_distributed_optimizer else 1,
        gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 or not args.bf16 else 2,
    )


def _reason(candidate: Candidate, plan: Plan, bound: str) -> str:
    others = [other for other in plan.best_of_each if other.schedule != candidate.schedule]
    text = f"the shortest step of {len(plan.best_of_each)} schedules {bound}"
    for other in others[:1]:
        text += f"; then {other.schedule}, {slower_by(other, candidate):.1%} longer"
    stock = next((other for other in others[1:] if other.schedule == "1f1b"), None)
    if stock is not None:
        text += f", and 1f1b, {slower_by(stock, candidate):.1%}"
    return text
