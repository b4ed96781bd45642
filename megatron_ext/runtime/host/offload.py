"""What a pass leaves for a later one is copied to the host and back, and its memory given back.

What F saves for its backward pass is learnt from autograd, whose hooks here only look; what I
leaves for W is what waits in the queue of weight gradients. Storages leave, not tensors: however
often one is saved, it travels once, and while it is away it is empty. So its memory is free whoever
refers to it, and what refers to it stays what it is.

A storage leaves only if nobody refers to it but those who saved it, and the stage, which keeps its
input. Parameters stay thereby, caches that microbatches share, outputs on their way, and whatever a
layer keeps for itself; small ones stay because a copy has a price of its own. One that nobody
refers to any more is not needed, and goes.

Memory belongs to the stream that it was allocated on, whose next allocation may get it as soon as
the host frees it. Streams besides that read a storage are told to the allocator (`record_stream`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ext.runtime.host.buffers import HostBuffers, Slot
from megatron_ext.runtime.host.copies import HostCopies, Piece, Transfer, copies_on
from megatron_ext.runtime.host.memory import buffer_sizes
from megatron_ext.runtime.owner import Handler, Owner
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Held
from megatron_ext.schedule.program.memory import most_on_host

SMALL = 2**17  # bytes; to start a copy takes as long as to copy about so many

_ALIGNMENT = 256  # of each storage in its slot

_Key = tuple[int, int, Held]  # stage, microbatch, what it holds


class ActivationOffload:
    """A rank's host buffers and copies. Lives as long as the training does.

    Attributes:
        bytes_left: of the step that began last, the bytes that have left, by stage and kind.
    """

    def __init__(self, rank: int, device: torch.device, copies: HostCopies | None = None) -> None:
        self.rank = rank
        self.device = device
        self.copies = copies or copies_on(device)
        self.buffers = HostBuffers(self.copies, rank)
        self.bytes_left: Counter[tuple[int, Held]] = Counter()

    def expect(self, row: tuple[Action, ...], costs: Costs) -> None:
        """Steps of ``row`` will come; ``costs`` may tell what leaves in them."""
        self.buffers.expected = buffer_sizes(row, costs)

    def step(self, row: tuple[Action, ...]) -> OffloadedStep:
        """Begin a step of which this rank does ``row``, before it has posted anything."""
        self.buffers.reserve(most_on_host(row))
        self.bytes_left.clear()
        return OffloadedStep(self, row)


@dataclass(frozen=True)
class _Moved:
    """A storage with its bytes. ``readers`` are the streams that autograd reads it on: a node runs
    its backward on the stream of its forward."""

    storage: torch.UntypedStorage
    size: int
    readers: frozenset[torch.cuda.Stream]


@dataclass
class _Away:
    """Storages that left by ``copy``, and their place on the host (no slot if there are none)."""

    copy: Action
    storages: list[_Moved]
    slot: Slot | None
    transfer: Transfer


@dataclass(frozen=True)
class _Coming:
    """Storages that come back by ``copy``.

    They are referred to until the copy has ended: the allocator must not give memory to others
    while the copy writes to it."""

    copy: Action
    storages: list[_Moved]
    transfer: Transfer


class OffloadedStep(Owner):
    """The copies of one step."""

    def __init__(self, offload: ActivationOffload, row: tuple[Action, ...]) -> None:
        self._offload = offload
        self._leaves = {(a.stage, a.microbatch) for a in row if a.kind is Kind.OFFLOAD_F}
        self._saved: dict[tuple[int, int], _Storages] = {}
        self._away: dict[_Key, _Away] = {}
        self._coming: dict[_Key, _Coming] = {}

    @contextlib.contextmanager
    def saving(self, stage: int, microbatch: int, x: Tensor | None) -> Iterator[None]:
        """Around F: note what it saves, if that is going to leave. ``x``: the stage's input."""
        if (stage, microbatch) not in self._leaves:
            yield
            return
        saved = self._storages()
        if x is not None:
            saved.note(x)

        def pack(tensor: Tensor) -> Tensor:
            # Never the tensor itself: one that an operation has made would keep that operation,
            # which keeps what it has saved. (And autograd would return another object anyhow, also
            # for a parameter: what a layer writes on that object does not reach the parameter.)
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

    def await_reload(self, action: Action) -> None:
        """Before the pass ``action``: what it uses is back."""
        for held in RULES[action.kind].releases:
            coming = self._coming.pop((action.stage, action.microbatch, held), None)
            if coming is not None:
                _wait(coming.copy, coming.transfer)

    def forget(self) -> None:
        """Nothing has left for the host: a step with offload never begins again."""
        self.finish()

    def finish(self) -> None:
        assert not self._saved and not self._away and not self._coming

    def abandon(self) -> None:
        """After an error: leave no copy under way into memory that others may get, and no buffer
        taken."""
        transfers = [coming.transfer for coming in self._coming.values()]
        for (stage, _, held), away in self._away.items():
            transfers.append(away.transfer)
            if away.slot is not None:
                away.slot.last = away.transfer
                self._offload.buffers.give_back((stage, held), away.slot)
        for transfer in transfers:
            with contextlib.suppress(Exception):  # the step's own error is the one to raise
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
        pieces = [(host, own) for own, host in _pieces(storages, slot)]
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
        # The current stream has waited for the copy. The one that the memory belongs to may not.
        here = _streams(self._offload.copies)
        for moved in away.storages:
            _tell_allocator(moved.storage, here)
            moved.storage.resize_(0)

    def _copy_back(self, action: Action) -> None:
        stage, kind, microbatch = action
        (held,) = RULES[kind].moves
        away = self._away[stage, microbatch, held]
        here = _streams(self._offload.copies)  # the memory belongs to this stream from now on
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
    """A storage, the tensors here that refer to it, and the streams that were current when they
    were noted."""

    storage: torch.UntypedStorage
    references: list[weakref.ref[Tensor]] = field(default_factory=list)
    readers: set[torch.cuda.Stream] = field(default_factory=set)


class _Storages:
    """Storages, and who refers to them."""

    def __init__(self, device: torch.device, copies: HostCopies) -> None:
        self._device = device
        self._copies = copies
        self._noted: dict[int, _Noted] = {}

    def note(self, tensor: Tensor) -> None:
        # Of other classes (quantised tensors) the storage is not all there is; they stay.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.device == self._device:
            noted = self._noted.setdefault(storage._cdata, _Noted(storage))
            noted.references.append(weakref.ref(tensor))
            noted.readers.update(_streams(self._copies))

    def take_exclusive(self) -> list[_Moved]:
        """Return the storages of some size that only noted tensors refer to.

        At least one of these tensors must still live: otherwise nobody will read what comes back.
        All noted tensors are forgotten, since autograd may keep its hooks, and through them this
        object, for longer.
        """
        all_noted, self._noted = self._noted, {}
        taken = []
        for noted in all_noted.values():
            storage = noted.storage
            alive = {
                id(tensor) for reference in noted.references if (tensor := reference()) is not None
            }
            here = len(alive) + 1  # and ``noted.storage`` itself
            if (
                alive
                and storage.nbytes() >= max(SMALL, 1)
                and storage.resizable()
                and torch._C._storage_Use_Count(storage._cdata) == here
            ):
                taken.append(_Moved(storage, storage.nbytes(), frozenset(noted.readers)))
        return taken


def _streams(copies: HostCopies) -> frozenset[torch.cuda.Stream]:
    """The current stream, if there are streams."""
    stream = copies.current_stream()
    return frozenset() if stream is None else frozenset([stream])


def _tell_allocator(storage: torch.UntypedStorage, streams: Iterable[torch.cuda.Stream]) -> None:
    """Keep the memory of ``storage``, once it is freed, until ``streams`` have done what they have
    been given by then."""
    for stream in streams:
        _bytes_of(storage).record_stream(stream)


def _pieces(storages: Iterable[_Moved], slot: Slot | None) -> list[Piece]:
    """Each storage, as bytes, and its place on the host."""
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
