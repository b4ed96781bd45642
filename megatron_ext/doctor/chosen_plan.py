"""The schedule that a launch chooses, by what is imported only then."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_ext.config import PipelineConfig
from megatron_ext.launch import Chosen

if TYPE_CHECKING:
    import torch.distributed as dist


def choose_plan(argv: Sequence[str], config: PipelineConfig, world_size: int) -> Chosen:
    """For `megatron_ext.launch`: what becomes of ``argv``, and why.

    Under torchrun, whose agent has a store before there are process groups, one rank chooses for
    all with the same ``argv``. Elsewhere each does, and all come to the same.

    Raises:
        ValueError: no schedule can run so.
        RuntimeError: the rank that chooses has failed otherwise, or died.
    """
    from megatron_ext.launch_planner.launch_choice import choose_for  # torch and Megatron
    from megatron_ext.runtime.store.leader import run_on_leader

    choose = partial(choose_for, argv, config, world_size)
    store = _agents_store(f"{argv} {config} {world_size}")
    if store is None:
        return choose()
    return run_on_leader(store, int(os.environ["RANK"]), "the choice of a schedule", choose)


def _agents_store(asked: str) -> dist.Store | None:
    """That of torchrun's agent, for those who have ``asked`` the same in this attempt; None where
    there is none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    digest = hashlib.sha256(asked.encode()).hexdigest()
    store = dist.TCPStore(address, port, is_master=False)
    return dist.PrefixStore(f"megatron_ext/plan/{attempt}/{digest}", store)
