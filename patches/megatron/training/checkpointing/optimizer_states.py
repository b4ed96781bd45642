"""Refusal of optimizer states that fit another placement only.

Without --dist-ckpt-optim-fully-reshardable the distributed optimizer's states are saved rank by
rank: under another placement a rank would load those of other stages, if the sizes agree. Megatron
compares only the number of ranks. A checkpoint therefore says on which rank each stage was (unless
the placement was Megatron's own) and whether the vocabulary was sharded over all ranks.

Not patched: saving and loading themselves; the formats that any placement can load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import dist_checkpointing, parallel_state

from megatron_ext.adapter.checkpoints.loading import (
    DIVIDED,
    RANK_OF_STAGE,
    DoesNotLoad,
    check_stages,
    command_of,
    why_weights_alone,
)
from megatron_ext.adapter.checkpoints.saved import SavedTraining
from megatron_ext.base.errors import exit_for
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.schedule.problem import VocabularyParallel


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that store stages' ranks in a checkpoint and compare them on loading."""
    resolved = config.resolved_spec
    divided = config.vocab_parallel is not VocabularyParallel.NONE

    def rank_of_stage(args: Any) -> list[int] | None:
        placement = resolved.place(args.pipeline_model_parallel_size)
        return None if placement.in_turn else list(placement.rank_of)

    def note(original: Callable[..., dict[str, Any]], args: Any, *rest: Any, **named: Any) -> Any:
        ours = {RANK_OF_STAGE: rank_of_stage(args), DIVIDED: divided}
        return original(args, *rest, **named) | ours

    def load(
        original: Callable[..., Any], load_dir: Any, args: Any, *rest: Any, **named: Any
    ) -> Any:
        loaded = original(load_dir, args, *rest, **named)
        state_dict, name, release, _ = loaded
        if state_dict and not release and parallel_state.model_parallel_is_initialized():
            try:
                _refuse_other_stages(state_dict, args, config, name)
            except DoesNotLoad as error:
                exit_for(error)
        return loaded

    return (
        wrap(
            "megatron.training.checkpointing:_build_sharded_state_dict_metadata",
            note,
            reason="a checkpoint stores which rank had which stage",
            signature="(args, dp_cp_group=None)",
        ),
        wrap(
            "megatron.training.checkpointing:_load_base_checkpoint",
            load,
            reason="optimizer states of another placement would go to the wrong stages",
        ),
    )


def _refuse_other_stages(
    state_dict: dict[str, Any], args: Any, config: PipelineConfig, name: str
) -> None:
    """Raise DoesNotLoad if optimizer states were saved with other stages on the ranks."""
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=state_dict)
    saved = SavedTraining(state_dict.get("args"), metadata or {})
    if why_weights_alone(saved.args, args, starts_anew=args.finetune):
        return
    try:
        check_stages(saved, command_of(args, config))
    except DoesNotLoad as error:
        raise DoesNotLoad(f"--load {name} does not load: {error}: {error.fix}", "") from None
    except ValueError:  # the saved arguments cannot be judged, and Megatron compares the sizes
        return
