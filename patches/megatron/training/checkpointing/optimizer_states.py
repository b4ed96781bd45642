"""Refusal of optimizer states that fit another placement only.

Without --dist-ckpt-optim-fully-reshardable the distributed optimizer's states are saved rank by
rank: under another placement a rank would load those of other stages, if the sizes agree. Megatron
compares only the number of ranks. A checkpoint therefore says on which rank each stage was, unless
it was Megatron's own, and whether the vocabulary was sharded over all ranks.

Not patched: saving and loading themselves; the formats that any placement can load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_ext.config import PipelineConfig
from megatron_ext.errors import exit_for
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.schedule.problem import VocabularyParallel

RANK_OF_STAGE = "pipeline_rank_of_stage"
_DIVIDED = "pipeline_vocabulary_is_divided"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that store the placement in a checkpoint, and compare it."""
    choice = config.choice
    divided = config.vocab_parallel is not VocabularyParallel.NONE

    def rank_of_stage(args: Any) -> list[int] | None:
        placement = choice.place(args.pipeline_model_parallel_size)
        return None if placement.in_turn else list(placement.rank_of)

    def note(original: Callable[..., dict[str, Any]], args: Any, *rest: Any, **named: Any) -> Any:
        ours = {RANK_OF_STAGE: rank_of_stage(args), _DIVIDED: divided}
        return original(args, *rest, **named) | ours

    def compare(
        original: Callable[..., Any],
        args: Any,
        model: Any,
        optimizer: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        states = named.get("optim_sd_kwargs") or {}
        if optimizer is not None and states.get("is_loading"):
            try:
                _compare(states["metadata"], rank_of_stage(args), divided)
            except ValueError as error:
                exit_for(error)
        return original(args, model, optimizer, *rest, **named)

    return (
        wrap(
            "megatron.training.checkpointing:_build_sharded_state_dict_metadata",
            note,
            reason="a checkpoint says which rank held which stage",
            signature="(args, dp_cp_group=None)",
        ),
        wrap(
            "megatron.training.checkpointing:generate_state_dict",
            compare,
            reason="refuse to load optimizer states of another placement",
            signature="(args, model, optimizer, opt_param_scheduler, rng_state, iteration=None, "
            "optim_sd_kwargs=None, model_sd_kwargs=None, rerun_state=None)",
        ),
    )


def _compare(metadata: dict[str, Any], now: list[int] | None, divided: bool) -> None:
    """Raise ValueError if a checkpoint's states do not fit the placement ``now``."""
    kind = metadata.get("distrib_optim_sharding_type")
    saved, was_divided = metadata.get(RANK_OF_STAGE), bool(metadata.get(_DIVIDED))
    if kind is None or kind in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return
    if (saved, was_divided) != (now, divided):
        raise ValueError(
            f"this checkpoint's optimizer states ({kind}) fit only the schedules they were saved "
            f"under: stages were on {_ranks(saved, was_divided)}, and are on "
            f"{_ranks(now, divided)}; save a checkpoint under such a schedule with "
            f"--dist-ckpt-optim-fully-reshardable, or load this one with --no-load-optim"
        )


def _ranks(rank_of_stage: list[int] | None, divided: bool) -> str:
    ranks = "Megatron's own ranks" if rank_of_stage is None else f"ranks {rank_of_stage}"
    return ranks + (" with the vocabulary split over all" if divided else "")
