"""Checkpoints of ranks with several chunks.

Each chunk has a loader of the same data, and Megatron saves the state of the first stage's loader.
Megatron assumes that the first stage is on the first rank of the pipeline's group. A checkpoint of
format torch has an entry for each chunk of a rank. Megatron takes missing chunks for empty stages,
so a checkpoint saved without virtual stages would silently load nothing.

Not patched: generate_state_dict and load_checkpoint, which process all chunks; the formats that
only models of one chunk have (torch_dcp and fsdp_dtensor read ``model[0]``; both need FSDP, which
is refused); load_biencoder_checkpoint and fix_query_key_value_ordering, which assert that there is
one chunk where they need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.training.checkpointing import CheckpointType

from megatron_ext.base.errors import exit_for
from megatron_ext.base.words import counted
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that save one data loader's state and refuse checkpoints of other chunks.

    Refused are checkpoints of format torch whose ranks had other chunks than now.
    """
    resolved = config.resolved_spec
    moves_stages = not resolved.example.in_turn

    def load_same_chunks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state_dict, name, release, kind = original(*args, **kwargs)
        if state_dict and kind == CheckpointType.LEGACY:
            chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
            try:
                _refuse_other_chunks(state_dict, str(resolved.spec), chunks, moves_stages, name)
            except ValueError as error:
                exit_for(error)
        return state_dict, name, release, kind

    return (
        wrap(
            "megatron.training.checkpointing:maybe_save_dataloader_state",
            save_first_loader,
            reason="the rank of the first stage saves the state of its data loader",
            digests={"0.18": "88509e3b8c17", "0.19, 0.20": "75369d2d8190"},
        ),
        wrap(
            "megatron.training.checkpointing:_load_base_checkpoint",
            load_same_chunks,
            reason="Megatron silently ignores the weights of a checkpoint with other chunks",
        ),
    )


def save_first_loader(
    original: Callable[..., None], train_iterator: Any, *args: Any, **groups: Any
) -> None:
    """Save the state of this rank's first data loader, if any, on the rank of the first stage."""
    if isinstance(train_iterator, list):
        train_iterator = next((loader for loader in train_iterator if loader is not None), None)
        if "pp_group" in groups:
            # Without a group Megatron calls the patched `is_pipeline_first_stage`.
            groups["pp_group"] = None
    original(train_iterator, *args, **groups)


def _refuse_other_chunks(
    state_dict: dict[str, Any], schedule: str, chunks: int | None, moves_stages: bool, name: str
) -> None:
    """Raise ValueError if a rank's checkpoint of format torch has other stages than now.

    The number of chunks differs, or the schedule places stages on other ranks than Megatron
    (``moves_stages``).
    """
    saved = len([key for key in state_dict if re.fullmatch(r"model\d*", key)])
    if chunks is not None and (saved != chunks or moves_stages):
        raise ValueError(
            f"--pipeline-schedule {schedule} puts {counted(chunks, 'stage')} on each rank, and "
            f"{name} has {counted(saved, 'stage')} for each in the order of Megatron's own ranks: "
            "only the placement that saved a checkpoint of format torch can load it; convert it by "
            "--load FOLDER --ckpt-convert-format torch_dist --ckpt-convert-save OTHER, added to "
            "the command that wrote it without --pipeline-... flags, and load OTHER"
        )
