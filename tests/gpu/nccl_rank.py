"""A rank of test_nccl.py: torchrun -m tests.gpu.nccl_rank SPEC P2P cuda|cpu FOLDER."""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.schedule.problem import P2P
from tests.gpu.small_stages import SHAPES, on_rank, program_of


def main(spec: str, p2p: str, kind: str, folder: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=120)  # a message that does not arrive in this time ends the run
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        # No device_id is given, as in Megatron: with one, every group would be split off the
        # world's communicator.
        dist.init_process_group("nccl", timeout=timeout)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)
    program = program_of(spec, ranks, P2P(p2p))
    seen = on_rank(rank, program, device, SHAPES[kind], by_host=False, compiles=True)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
