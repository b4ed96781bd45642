"""scripts/pretrain_gpt.py, changed to print each loss to the last bit and to save quickly."""

from __future__ import annotations

import multiprocessing
import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import training

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"


def record_losses() -> None:
    log = training.training_log

    def recorded(
        losses: Mapping[str, Any], total: Any, rate: Any, iteration: int, *args: Any, **kwargs: Any
    ) -> Any:
        if "lm loss" in losses:
            loss = float(losses["lm loss"])
            # The line is written by one call, so that lines of several ranks do not mix.
            os.write(1, f"\nloss of iteration {iteration}: {loss.hex()}\n".encode())
        return log(losses, total, rate, iteration, *args, **kwargs)

    training.training_log = recorded


if __name__ == "__main__":
    record_losses()
    # The queue of checkpoint results is made here by a fork. Megatron would spawn a process for it
    # on each rank, which imports all of Megatron.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    runpy.run_path(str(SCRIPT), run_name="__main__")
