"""Training script of tests: scripts/pretrain_gpt.py with data loaders of its own (--dataloader-type
external).

As in scripts of multimodal models, the ranks of the first and of the last stage read data, and all
other ranks get None. Loaders count their microbatches, and can save that count (--dataloader-save
DIR).
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.training import get_args
from torch import Tensor

script = runpy.run_path(
    str(Path(__file__).parents[3] / "scripts" / "pretrain_gpt.py"), run_name="script"
)
names = script["main"].__globals__


class Loader:
    """An endless loader of random tokens, which differ between data-parallel replicas."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._microbatches = 0

    def __next__(self) -> dict[str, Tensor]:
        args, replica = get_args(), mpu.get_data_parallel_rank()
        seed = hash((self._seed, replica, self._microbatches))
        self._microbatches += 1
        shape = args.micro_batch_size, args.seq_length + 1
        generator = torch.Generator().manual_seed(seed % 2**32)
        text = torch.randint(60, shape, generator=generator)
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        positions = torch.arange(args.seq_length).expand_as(tokens).contiguous()
        mask = torch.ones(tokens.shape)
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}

    def save_state(self) -> dict[str, int]:
        return {"microbatches": self._microbatches}


def loaders(samples: list[int], vp_stage: int | None = None) -> tuple[Loader | None, ...]:
    """Return the loaders for training, validation and testing, or None if this rank reads no data
    for the chunk."""
    if not names["needs_data"](vp_stage):
        return None, None, None
    return Loader(1), Loader(2), Loader(3)


loaders.is_distributed = True  # type: ignore[attr-defined]


def add_flag(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--dataloader-save")
    return parser


if __name__ == "__main__":
    parse: Callable[..., Any] = names["parse_and_validate_args"]
    names["parse_and_validate_args"] = partial(parse, add_flag)
    names["datasets"] = loaders
    script["main"]()
