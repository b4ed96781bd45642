"""Step in a checkpoint that must be rerun, to tell a faulty GPU from a faulty program.

After a suspicious result that it can reproduce, Megatron saves the result and ends; the resumed job
reruns the step on other GPUs and compares. Some results, such as gradient norms of buckets, belong
to a rank's chunks: with other stages on the rank the result differs, and Megatron would blame the
GPU. Megatron also asserts that a rank has as many loaders as before.

Not patched: the rerun machine itself, which processes the loaders of all chunks; the cases in which
Megatron ignores the pending step (other sizes, --finetune, --rerun-mode disabled).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

from megatron_ext.adapter.checkpoints.loading import RANK_OF_STAGE
from megatron_ext.base.errors import exit_for
from megatron_ext.base.words import counted
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.schedule.placement import Placement

_SIZES = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
)


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patch that refuses to rerun a pending step with other stages on the ranks."""
    resolved = config.resolved_spec

    def load(
        original: Callable[..., Any], load_dir: Any, args: Any, *rest: Any, **named: Any
    ) -> Any:
        loaded = original(load_dir, args, *rest, **named)
        state_dict, _, release, _ = loaded
        if state_dict and not release and parallel_state.model_parallel_is_initialized():
            placement = resolved.place(args.pipeline_model_parallel_size)
            try:
                _refuse_other_placement(state_dict, args, placement, str(resolved.spec))
            except ValueError as error:
                exit_for(error)
        return loaded

    return (
        wrap(
            "megatron.training.checkpointing:_load_base_checkpoint",
            load,
            reason="a step that Megatron reruns from a checkpoint, to compare results, must run in "
            "the pipeline stages of the checkpoint",
        ),
    )


def _refuse_other_placement(
    state_dict: dict[str, Any], args: Any, placement: Placement, schedule: str
) -> None:
    """Raise ValueError if a pending step, to be rerun, ran under another placement."""
    machine, saved = get_rerun_state_machine(), state_dict.get("args")
    if machine.get_mode() == RerunMode.DISABLED or args.finetune or saved is None:
        return
    if not machine.validate_state_dict(state_dict.get("rerun_state_machine")):
        return
    if any(getattr(saved, name, None) != getattr(args, name) for name in _SIZES):
        return
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=state_dict) or {}
    then = metadata.get(RANK_OF_STAGE), saved.virtual_pipeline_model_parallel_size or 1
    now = None if placement.in_turn else list(placement.rank_of), placement.chunks
    if then != now:
        raise ValueError(
            f"--pipeline-schedule {schedule} puts {counted(now[1], 'stage')} on each rank, but "
            "Megatron would repeat a step of this checkpoint to compare its results rank by rank, "
            f"and that step ran with {counted(then[1], 'stage')} on each rank (stages on ranks "
            f"{then[0] or 'in order'}); resume under the schedule of the checkpoint "
            f"({getattr(saved, 'pipeline_schedule', None) or 'none'}), or add --rerun-mode "
            "disabled, which ignores the step's results"
        )
