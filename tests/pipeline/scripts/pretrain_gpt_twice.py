"""Training script of tests that runs scripts/pretrain_gpt.py twice in one process.

Process groups and globals are destroyed in between, as Megatron's --inprocess-restart does. The
variable FAILS_AT is the iteration of the first training, counted from 1, in which global rank 1
raises.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training.global_vars import get_args
from megatron.training.training import destroy_global_state

FAILS_AT = int(os.environ.get("FAILS_AT", "0"))

script = runpy.run_path(
    str(Path(__file__).parents[3] / "scripts" / "pretrain_gpt.py"), run_name="script"
)
names = script["main"].__globals__
forward_step, pretrain = names["forward_step"], names["pretrain"]


def failing_forward_step(*args: Any, **kwargs: Any) -> Any:
    if get_args().curr_iteration + 1 == FAILS_AT and dist.get_rank() == 1:
        raise RuntimeError("a rank fails")
    return forward_step(*args, **kwargs)


def train(number: int) -> None:
    """Run training ``number`` with a store of its own, which has no keys of the other training's
    groups."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    kept_apart = dist.PrefixStore(str(number), store)
    names["pretrain"] = functools.partial(pretrain, store=kept_apart)
    script["main"]()


if __name__ == "__main__":
    names["forward_step"] = failing_forward_step
    with contextlib.suppress(RuntimeError) if FAILS_AT else contextlib.nullcontext():
        train(0)
        if FAILS_AT:
            sys.exit("the first training has not failed")
    destroy_global_state()
    dist.destroy_process_group()
    names["forward_step"] = forward_step
    train(1)
