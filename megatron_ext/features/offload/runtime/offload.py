"""Copies of activations to the host and back; their device memory is freed in between.

Autograd's saved-tensor hooks tell which tensors F saves for its backward pass (the hooks change
nothing). The queue of weight gradients tells which tensors I stores for W. Whole storages are
offloaded, not tensors: a storage that several tensors share is copied once, and is resized to 0
bytes while it is on the host, so its memory is free although tensors still refer to it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import override

import torch
from torch import Tensor

from megatron_ext.compile.program.memory import most_on_host
from megatron_ext.features.offload.runtime.buffers import HostBuffers, Slot
from megatron_ext.runtime.host.copies import CopiedBytes, HostCopies, Transfer, copies_on
from megatron_ext.runtime.host.host_memory import buffer_sizes
from megatron_ext.runtime.owner import Handler, Owner
from megatron_ext.runtime.stage_passes import PassContext
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Held

# Smallest tensor in bytes that is offloaded. Starting a copy takes as long as copying this many
# bytes.
SMALL = 2**17

_ALIGNMENT = 256  # alignment in bytes of each storage in its slot

_Key = tuple[int, int, Held]  # stage, microbatch and kind of memory of the offloaded tensors


class ActivationOffload:
    """Host buffers and copies of a rank for offloaded activations, during a whole training.

    Attributes:
        bytes_left: bytes offloaded in the latest step, by stage and kind of memory.
    """

    def __init__(self, rank: int, device: torch.device, copies: HostCopies | None = None) -> None:
        self.rank = rank
        self.device = device
        self.copies = copies or copies_on(device)
        self.buffers = HostBuffers(self.copies, rank)
        self.bytes_left: Counter[tuple[int, Held]] = Counter()

    def expect(self, row: tuple[Action, ...], costs: Costs) -> None:
        """Prepare offload for steps of a rank's ``row``.

        ``costs`` may give the sizes of the offloaded tensors.
        """
        self.buffers.expected = buffer_sizes(row, costs)

    def step(self, row: tuple[Action, ...]) -> OffloadedStep:
        """Begin a step in which this rank runs ``row``, before the rank posts any message."""
        self.buffers.reserve(most_on_host(row))
        self.bytes_left.clear()
        return OffloadedStep(self, row)


@dataclass(frozen=True)
class _Moved:
    """Offloaded storage with its size in bytes.

    ``readers`` are the streams on which autograd reads it: a node runs its backward pass on the
    stream of its forward pass.
    """

    storage: torch.UntypedStorage
    size: int
    readers: frozenset[torch.cuda.Stream]


@dataclass
class _Away:
    """Storages that are on the host: the copy that moved them, and their host buffer.

    ``slot`` is None if there are no storages.
    """

    copy: Action
    storages: list[_Moved]
    slot: Slot | None
    transfer: Transfer


@dataclass(frozen=True)
class _Coming:
    """Storages that are being copied back from the host by ``copy``.

    They are referenced until the copy has ended, so that the allocator cannot reuse memory to which
    the copy still writes.
    """

    copy: Action
    storages: list[_Moved]
    transfer: Transfer


class OffloadedStep(Owner, PassContext):
    """Owner of the copies of activations to the host and back in one step."""

    def __init__(self, offload: ActivationOffload, row: tuple[Action, ...]) -> None:
        self._offload = offload
        self._leaves = {(a.stage, a.microbatch) for a in row if a.kind is Kind.OFFLOAD_F}
        self._saved: dict[tuple[int, int], _Storages] = {}
        self._away: dict[_Key, _Away] = {}
        self._coming: dict[_Key, _Coming] = {}

    @override
    @contextlib.contextmanager
    def around_forward(self, stage: int, microbatch: int, x: Tensor | None) -> Iterator[None]:
        """Context of F, which collects the tensors that F saves if they will be offloaded."""
        if (stage, microbatch) not in self._leaves:
            yield
            return
        saved = self._storages()
        if x is not None:
            saved.note(x)

        def pack(tensor: Tensor) -> Tensor:
            if isinstance(tensor, torch.nn.Parameter):
                # A parameter is not offloaded: I reads its current value, since a caller may set
                # its data.
                return tensor
            # An alias is saved in place of the tensor. The output of an operation would keep that
            # operation alive, and with it all tensors that the operation saved. (Autograd returns
            # another object anyhow, for a parameter too: an attribute that is set on that object
            # does not reach the parameter.)
            alias = tensor.detach()
            saved.note(alias)
            return alias

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda alias: alias):
            yield
        self._saved[stage, microbatch] = saved

    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.OFFLOAD_F: self._copy_out,
            Kind.OFFLOAD_I: self._copy_out,
            Kind.FREE_F: self._free,
            Kind.FREE_I: self._free,
            Kind.RELOAD_F: self._copy_back,
            Kind.RELOAD_I: self._copy_back,
        }

    @override
    def before_backward(self, action: Action) -> None:
        """Wait until the memory that the backward pass ``action`` uses has been copied back."""
        for held in RULES[action.kind].releases:
            coming = self._coming.pop((action.stage, action.microbatch, held), None)
            if coming is not None:
                _wait(coming.copy, coming.transfer)

    def forget(self) -> None:
        """Do nothing, as a step with offload never restarts."""
        self.finish()

    def finish(self) -> None:
        assert not self._saved and not self._away and not self._coming

    def abandon(self) -> None:
        """Wait for all copies after an error, and free all buffers.

        Otherwise a copy could write to memory that is reused.
        """
        transfers = [coming.transfer for coming in self._coming.values()]
        for (stage, _, held), away in self._away.items():
            transfers.append(away.transfer)
            if away.slot is not None:
                away.slot.last = away.transfer
                self._offload.buffers.give_back((stage, held), away.slot)
        for transfer in transfers:
            # The error of the step itself is raised, not one of this cleanup.
            with contextlib.suppress(Exception):
                transfer.wait()
        self._saved.clear()
        self._away.clear()
        self._coming.clear()

    def _storages(self) -> _Storages:
        return _Storages(self._offload.device, self._offload.copies)

    def _copy_out(self, action: Action) -> None:
        stage, kind, microbatch = action
        (held,) = RULES[kind].moves
        if held is Held.ACTIVATION:
            saved = self._saved.pop((stage, microbatch))
        else:
            saved = self._storages()
            for tensor in queue.tensors(stage, microbatch):
                saved.note(tensor)
        storages = saved.take_exclusive()
        size = sum(_aligned(moved.size) for moved in storages)
        slot = self._offload.buffers.take((stage, held), size) if storages else None
        pieces = [(host, piece) for piece, host in _pieces(storages, slot)]
        try:
            transfer = self._offload.copies.start(action, pieces, slot.last if slot else None)
        except BaseException:
            if slot is not None:
                self._offload.buffers.give_back((stage, held), slot)
            raise
        self._away[stage, microbatch, held] = _Away(action, storages, slot, transfer)
        self._offload.bytes_left[stage, held] += sum(moved.size for moved in storages)

    def _free(self, action: Action) -> None:
        stage, kind, microbatch = action
        (held,) = RULES[kind].releases
        away = self._away[stage, microbatch, held]
        _wait(away.copy, away.transfer)
        # The current stream has waited for the copy to the host. The stream that owns the memory
        # may not have, so the allocator is told of both.
        here = _streams(self._offload.copies)
        for moved in away.storages:
            _tell_allocator(moved.storage, here)
            moved.storage.resize_(0)

    def _copy_back(self, action: Action) -> None:
        stage, kind, microbatch = action
        (held,) = RULES[kind].moves
        away = self._away[stage, microbatch, held]
        # The allocator gives the new memory to the current stream, so the other streams that read
        # the memory are registered with the allocator.
        here = _streams(self._offload.copies)
        for moved in away.storages:
            moved.storage.resize_(moved.size)
            _tell_allocator(moved.storage, moved.readers - here)
        pieces = _pieces(away.storages, away.slot)
        transfer = self._offload.copies.start(action, pieces, None)
        del self._away[stage, microbatch, held]
        self._coming[stage, microbatch, held] = _Coming(action, away.storages, transfer)
        if away.slot is not None:
            away.slot.last = transfer
            self._offload.buffers.give_back((stage, held), away.slot)


@dataclass(frozen=True)
class _Noted:
    """Storage with the tensors that refer to it, as collected for offload.

    ``readers`` are the streams that were current when the tensors were noted.
    """

    storage: torch.UntypedStorage
    references: list[weakref.ref[Tensor]] = field(default_factory=list)
    readers: set[torch.cuda.Stream] = field(default_factory=set)


class _Storages:
    """Collected storages that may be offloaded, each with the tensors that refer to it."""

    def __init__(self, device: torch.device, copies: HostCopies) -> None:
        self._device = device
        self._copies = copies
        self._noted: dict[int, _Noted] = {}

    def note(self, tensor: Tensor) -> None:
        # Tensors of other classes, such as quantised tensors, have several storages and are not
        # offloaded.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.device == self._device:
            noted = self._noted.setdefault(storage._cdata, _Noted(storage))
            noted.references.append(weakref.ref(tensor))
            noted.readers.update(_streams(self._copies))

    def take_exclusive(self) -> list[_Moved]:
        """Return the storages of at least `SMALL` bytes that only the collected tensors refer to.

        A storage is offloaded only if nothing refers to it except the tensors that saved it and the
        stage's input. Parameters, caches that microbatches share, outputs being sent and tensors
        that a layer stores itself therefore stay, as do small storages.

        At least one of these tensors must be alive: otherwise nothing will read the copy. All
        collected tensors are dropped, since autograd may store its hooks, and through them this
        object, for longer.
        """
        all_noted, self._noted = self._noted, {}
        taken = []
        for noted in all_noted.values():
            storage = noted.storage
            alive = {
                id(tensor) for reference in noted.references if (tensor := reference()) is not None
            }
            here = len(alive) + 1  # references held here: the live tensors and ``noted.storage``
            if (
                alive
                and storage.nbytes() >= max(SMALL, 1)
                and storage.resizable()
                and torch._C._storage_Use_Count(storage._cdata) == here
            ):
                taken.append(_Moved(storage, storage.nbytes(), frozenset(noted.readers)))
        return taken


def _streams(copies: HostCopies) -> frozenset[torch.cuda.Stream]:
    """Return the device's current stream as a set; empty if the device has no streams."""
    stream = copies.current_stream()
    return frozenset() if stream is None else frozenset([stream])


def _tell_allocator(storage: torch.UntypedStorage, streams: Iterable[torch.cuda.Stream]) -> None:
    """Make the allocator reuse the memory of ``storage`` only after work on other ``streams``.

    The allocator waits for the work that has been launched on these streams when the memory is
    freed. Memory belongs to the stream that allocated it: the next allocation of that stream may
    get it as soon as the host frees it. Other streams that read a storage are therefore announced
    to the allocator (`record_stream`).
    """
    for stream in streams:
        _bytes_of(storage).record_stream(stream)


def _pieces(storages: Iterable[_Moved], slot: Slot | None) -> list[CopiedBytes]:
    """Return each storage as (its bytes, the bytes of the host buffer that it is copied to)."""
    pieces, offset = [], 0
    for moved in storages:
        assert slot is not None
        host = slot.buffer[offset : offset + moved.size]
        pieces.append((_bytes_of(moved.storage), host))
        offset += _aligned(moved.size)
    return pieces


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _wait(copy: Action, transfer: Transfer) -> None:
    try:
        transfer.wait()
    except Exception as error:
        error.add_note(f"megatron_ext: the copy {copy} has failed")
        raise
