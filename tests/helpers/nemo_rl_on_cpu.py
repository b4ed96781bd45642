"""NeMo-RL's own policy steps under several schedules, each on forked ranks of a process that has
imported NeMo-RL: ``python -m tests.helpers.nemo_rl_on_cpu FOLDER TRAINING...``

A training is the name of a schedule, or ``stock`` for Megatron's own. FOLDER gets a file of results
for each training and rank. NeMo-RL is a checkout of its public sources.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.helpers import megatron_runs
from tests.helpers.launched_script import printed_by_ranks
from tests.helpers.nemo_rl_checkout import CHECKOUT
from tests.helpers.stand_ins import OF_BRIDGE, stand_ins

SCRIPT = Path(__file__).with_name("nemo_rl_policy.py")
# Packages that NeMo-RL imports for logs, for its workers' messages and for GPU queries, and that
# stand-ins replace.
_OF_NEMO_RL = ("mlflow", "prometheus_client", "pynvml", "swanlab", "zmq", "wandb")


def import_nemo_rl() -> None:
    # The import of megatron_runs does work once that each rank would repeat.
    assert megatron_runs.SCRIPT.exists()
    sys.path.append(str(CHECKOUT))
    # These two classes exist only in the Megatron main branch that NeMo-RL pins. NeMo-RL's worker
    # checks for them with isinstance.
    adapter: Any = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    for name in ("FullyShardedDataParallelV1", "FullyShardedDataParallelV2"):
        setattr(adapter, name, type(name, (), {}))
    with stand_ins(*OF_BRIDGE, "torch.utils.tensorboard", *_OF_NEMO_RL):
        importlib.import_module("nemo_rl.models.policy.workers.megatron_policy_worker")


def train(folder: Path, training: str, ranks: int) -> str:
    """Train, and return everything that the ranks printed; the results are in files of
    ``folder``."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "NEMO_RL_POLICY": json.dumps({"result": str(folder / f"{training}.json")}),
    }
    if training != "stock":
        variables["MEGATRON_EXT_SCHEDULE"] = training
    return printed_by_ranks(SCRIPT, ranks, variables)


def run(folder: str, *trainings: str) -> None:
    import_nemo_rl()
    for training in trainings:
        print(train(Path(folder), training, int(os.environ.get("POLICY_RANKS", "2"))))


if __name__ == "__main__":
    run(*sys.argv[1:])
