"""Check whether a launch's checkpoint can be loaded if its stages move to other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_ext.launch_command.checkpoint import iteration_to_load


def on_loading(args: Any, *, stages_move: bool) -> str:
    """Say in a line whether ``--load`` of the validated ``args`` goes with the schedule.

    ``stages_move``: whether stages are on other ranks than before, or the vocabulary is split.
    """
    folder = iteration_to_load(args.load, args.ckpt_step)
    if folder is None:
        return (
            f"--load {args.load} is not here to be looked at: a torch_dist checkpoint can be "
            f"loaded under any schedule and sizes, and its optimizer states if it was saved "
            f"without the distributed optimizer or with --dist-ckpt-optim-fully-reshardable"
        )
    name = f"--load {folder}"
    if maybe_load_config(str(folder)) is None:
        return (
            f"{name} has a file a rank, which only the same stages load: save it once with "
            f"--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
            if stages_move
            else f"{name} has a file a rank, and stages stay where they are: it can be loaded"
        )
    states = _states_of(folder)
    if not stages_move or states is None or _travels(states):
        return f"{name} can be loaded, optimizer states too"
    return (
        f"{name}: the model can be loaded, and its optimizer states ({states}) not, since stages "
        f"are on other ranks: go on once as before and save with "
        f"--dist-ckpt-optim-fully-reshardable, or write --no-load-optim"
    )


def _states_of(folder: Path) -> str | None:
    """Return how the distributed optimizer's states were saved; None: it has none."""
    metadata = dist_checkpointing.load_content_metadata(str(folder))
    return None if metadata is None else metadata.get("distrib_optim_sharding_type")


def _travels(states: str) -> bool:
    return states in DistributedOptimizer.checkpoint_fully_reshardable_formats
