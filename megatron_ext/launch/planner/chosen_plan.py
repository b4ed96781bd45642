"""Choice of a schedule at a launch. Imports torch and Megatron only when it is called.

The choice must be the same on all ranks, and patches depend on it, so it is made before any process
group exists. Under torchrun one rank chooses for all, through the store of torchrun's agent;
elsewhere each rank computes the same.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_ext.config import PipelineConfig
from megatron_ext.launch.script import Chosen

if TYPE_CHECKING:
    import torch.distributed as dist


def choose_plan(argv: Sequence[str], config: PipelineConfig, world_size: int) -> Chosen:
    """Return the flags that are chosen for the launch with ``argv``, and the reason.

    Under torchrun, whose agent has a store before process groups exist, one rank chooses for all
    ranks with the same ``argv``. Elsewhere each rank chooses, and all choose the same.

    Raises:
        ValueError: no schedule can run under these flags, or Megatron is not installed.
        RuntimeError: the rank that chooses has died, or failed for another reason.
    """
    try:
        # The module `launch_choice` imports torch and Megatron, and so is imported only here.
        from megatron_ext.launch.planner.launch_choice import choose_for
    except ImportError as error:
        raise ValueError(
            f"--pipeline-schedule {config.schedule} needs Megatron, which cannot be imported here: "
            f"{error}"
        ) from error
    from megatron_ext.runtime.store.leader import run_on_leader

    choose = partial(choose_for, argv, config, world_size)
    store = _agents_store(f"{argv} {config} {world_size}")
    if store is None:
        return choose()
    return run_on_leader(store, int(os.environ["RANK"]), "the choice of a schedule", choose)


def _agents_store(request: str) -> dist.Store | None:
    """Return the store of torchrun's agent, for ranks with the same ``request``.

    Return None without torchrun. The keys that are used are different at each restart by the
    launcher, so an earlier attempt's values are not read.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed as dist

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    digest = hashlib.sha256(request.encode()).hexdigest()
    store = dist.TCPStore(address, port, is_master=False)
    return dist.PrefixStore(f"megatron_ext/plan/{attempt}/{digest}", store)
