"""Recorder of a training's results: after setup, after each iteration, and at the end.

It changes no tensor. The training itself saves nothing, and ends after the requested iterations.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_ext.adapter.parity.digest import bits_of, digest
from megatron_ext.adapter.parity.named_tensors import NamedTensor, NamedTensors
from megatron_ext.base.secrets import without_secrets
from megatron_ext.recordings.piece import Piece
from megatron_ext.recordings.writing import RankWriter

_PLAIN = (bool, int, float, str, type(None))


class ParityRecorder:
    """Recorder of a training's results: losses, norms and tensors of some iterations.

    Raises:
        ValueError: the rank has recorded into ``folder`` before, the folder cannot be written to,
            or the model has no names in torch_dist; raised by ``begin``, before anything is
            trained.
    """

    def __init__(self, folder: Path, iterations: int) -> None:
        self._folder = folder
        self._iterations = iterations
        self._last = 0

    def begin(self, model: Any, optimizer: Any, args: Any) -> None:
        """Start to record before the first iteration.

        ``args`` are Megatron's arguments. They are changed so that the training saves nothing, and
        ends after the recorded iterations.
        """
        first = int(args.iteration)
        iterations = min(self._iterations, (args.train_iters or 0) - first)
        if iterations < 1:
            raise ValueError(
                f"nothing is left to train: the checkpoint is of iteration {first}, and "
                f"--train-iters is {args.train_iters}; load an earlier checkpoint (--ckpt-step), "
                "or give both commands a larger --train-iters"
            )
        self._last = first + iterations
        self._gathers = args.use_distributed_optimizer and args.overlap_param_gather
        about = {
            "world_size": dist.get_world_size(),
            "first": first,
            "iterations": iterations,
            "arguments": plain_arguments(args) if dist.get_rank() == 0 else {},
        }
        args.exit_interval = self._last
        args.save = None
        self._tensors = NamedTensors(model, optimizer, args)
        self._writer = RankWriter(self._folder, dist.get_rank(), about)
        self._writer.iteration(first, {}, digests(self._tensors.parameters()))

    def iteration(self, iteration: int, losses: Mapping[str, Any], norm: Any, skipped: int) -> None:
        """Record Megatron's log of an iteration, and digests of this rank's tensors after it."""
        figures = {
            "losses": {name: logged_loss(value) for name, value in losses.items()},
            "norm": None if norm is None else float(norm),
            "skipped": bool(skipped),
        }
        self._writer.iteration(iteration, figures, digests(self._now()))

    def _now(self) -> Iterator[NamedTensor]:
        """Yield the tensors that are final after an iteration.

        Parameters are not final if the next step gathers them from the optimizer.
        """
        if not self._gathers:
            yield from self._tensors.parameters()
        yield from self._tensors.optimizer_states()

    def is_last(self, iteration: int) -> bool:
        return iteration >= self._last

    def end(self) -> None:
        """Record the contents of all tensors after the last iteration, with gathered parameters."""
        self._writer.end(
            (piece, memoryview(bits_of(tensor).cpu().numpy()).cast("B"))
            for tensors in (self._tensors.parameters(), self._tensors.optimizer_states())
            for piece, tensor in tensors
            if not piece.is_copy and piece.numel
        )


def digests(tensors: Iterator[NamedTensor]) -> dict[Piece, int]:
    """Return the digest of each piece of ``tensors``.

    Digests on one device are copied to the host together.
    """
    pieces: list[Piece] = []
    values: list[torch.Tensor] = []
    for piece, tensor in tensors:
        pieces.append(piece)
        values.append(digest(tensor, piece))
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        by_device.setdefault(value.device, []).append(place)
    found: dict[Piece, int] = {}
    for places in by_device.values():
        numbers = torch.stack([values[place] for place in places]).tolist()
        found |= {pieces[place]: number for place, number in zip(places, numbers, strict=True)}
    return found


def logged_loss(value: Any) -> float:
    """Return a reduced loss as Megatron logs it; ``value`` is a tensor, or a sum with its count."""
    if isinstance(value, torch.Tensor) and value.numel() == 2:
        return float(value[0] / value[1])
    return float(value)


def plain_arguments(args: Any) -> dict[str, Any]:
    """Return Megatron's arguments without secrets, by name, as values that JSON can have.

    Plain values and lists of plain values stay as they are; all others become text.
    """
    return {name: _plain(value) for name, value in sorted(without_secrets(vars(args)).items())}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, _PLAIN) else str(value)


def give_up(error: ValueError) -> NoReturn:
    """End this rank with exit code 2 and the ``error`` on stderr.

    The launcher then ends the other ranks. The rank may be the only one that knows the error.
    """
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"megatron_ext: error on rank {rank}: {error}\n")
    raise SystemExit(2)
