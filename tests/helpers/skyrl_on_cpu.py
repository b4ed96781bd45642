"""SkyRL's own policy steps under several schedules, each on forked ranks of a process that has
imported SkyRL: ``python -m tests.helpers.skyrl_on_cpu FOLDER TRAINING...``

A training is the name of a schedule, or ``stock`` for Megatron's own. FOLDER gets a file of results
for each training and rank.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron.core.distributed import finalize_model_grads

from tests.helpers import megatron_runs
from tests.helpers.launched_script import printed_by_ranks
from tests.helpers.stand_ins import OF_BRIDGE, stand_ins

SCRIPT = Path(__file__).with_name("skyrl_policy.py")
# Packages that SkyRL imports for its logs, annotations, environments, checkpoints and servers, and
# that stand-ins replace.
_OF_SKYRL = (
    "aiohttp",
    "cloudpathlib",
    "jaxtyping",
    "loguru",
    "nvidia_resiliency_ext",
    "pybase64",
    "skyrl_gym",
)


def import_skyrl() -> None:
    # The import of megatron_runs does work once that each rank would repeat.
    assert megatron_runs.SCRIPT.exists()
    with stand_ins(*OF_BRIDGE, "torch.utils.tensorboard", *_OF_SKYRL):
        # SkyRL 0.4.0 imports two functions that no published Megatron-Bridge has. SkyRL calls these
        # functions for the gradients of adapters that all experts share; other models do not need
        # them.
        utils: Any = importlib.import_module("megatron.bridge.peft.utils")
        utils.enable_expert_parallel_grad_sync_in_finalize = lambda chunks: None
        utils.finalize_model_grads_with_expert_adapter_sync = finalize_model_grads
        importlib.import_module("skyrl.backends.skyrl_train.workers.megatron.megatron_worker")


def train(folder: Path, training: str, ranks: int) -> str:
    """Train, and return everything that the ranks printed; the results are in files of
    ``folder``."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "SKYRL_POLICY": json.dumps({"result": str(folder / f"{training}.json")}),
    }
    if training != "stock":
        variables["MEGATRON_EXT_SCHEDULE"] = training
    return printed_by_ranks(SCRIPT, ranks, variables)


def run(folder: str, *trainings: str) -> None:
    import_skyrl()
    for training in trainings:
        print(train(Path(folder), training, int(os.environ.get("POLICY_RANKS", "2"))))


if __name__ == "__main__":
    run(*sys.argv[1:])
