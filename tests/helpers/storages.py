"""The memory that tensors take, without Megatron: living storages, and tensors of messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import Placement


class LiveStorages(TorchDispatchMode):
    """The storages created while this mode is on that are still alive.

    Storages that are created from now on are recorded as created by the action ``maker``. A weak
    reference keeps the address of its storage, so an address means one storage as long as this
    object knows it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maker: Action | None = None
        self.maker_of: dict[int, Action | None] = {}
        self._references: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.c10d.allreduce_.default and ProcessGroup.unbox(args[1]).size() == 1:
            # A sum over one rank is not run, as gloo's thread would drop its tensor only a moment
            # after the wait for the sum.
            return args[0], FakeWork().boxed()
        result = func(*args, **(kwargs or {}))
        # torch.tensor() ends with lift_fresh on its new tensor, so the tensor counts as new.
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        before = {storage._cdata for storage in storages(given)}
        for storage in storages(result):
            if storage._cdata not in before:
                self.maker_of[storage._cdata] = self.maker
                self._references[storage._cdata] = StorageWeakRef(storage)
        return result

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each living storage, by its address."""
        sizes = {}
        for address in list(self._references):
            storage = torch.UntypedStorage._new_with_weak_ptr(address)
            if storage is None:
                del self._references[address], self.maker_of[address]
            else:
                sizes[address] = storage.nbytes()
        return sizes


def storages(tree: object) -> list[torch.UntypedStorage]:
    """Return the storages in the nested structure ``tree``, and the storages of the tensors in
    it."""
    leaves = tree_leaves(tree)
    return [
        leaf.untyped_storage() if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
        if isinstance(leaf, Tensor | torch.UntypedStorage)
    ]


def addresses(tree: object) -> set[int]:
    return {storage._cdata for storage in storages(tree)}


def messages_on_their_way(row: Sequence[Action], placement: Placement) -> list[int]:
    """Return, for each action of a rank's ``row``, how many activations and gradients between
    stages the rank must hold after it, in addition to those that the simulator counts."""
    moving: set[tuple[Kind, int, int]] = set()
    counts = []
    for stage, kind, microbatch in row:
        kinds = RULES[kind].covers
        if Kind.FORWARD in kinds:
            moving.discard((Kind.RECV_F, stage, microbatch))
            # if both stages are on this rank, the activation was passed on without a message
            moving.discard((Kind.SEND_F, stage - 1, microbatch))
            if not placement.is_last(stage):
                moving.add((Kind.SEND_F, stage, microbatch))
        elif Kind.BACKWARD_INPUT in kinds:
            moving.discard((Kind.RECV_B, stage, microbatch))
            moving.discard((Kind.SEND_B, stage + 1, microbatch))
            if not placement.is_first(stage):
                moving.add((Kind.SEND_B, stage, microbatch))
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            moving.add((kind, stage, microbatch))
        elif Kind.WAIT_F in kinds:
            moving.remove((Kind.SEND_F, stage, microbatch))
        elif Kind.WAIT_B in kinds:
            moving.remove((Kind.SEND_B, stage, microbatch))
        counts.append(len(moving))
    return counts
