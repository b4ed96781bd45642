"""Tests of snapshots of all that a step overwrites: restored bit for bit, from buffers that are
allocated once."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
import torch

from megatron_ext.features.post_validation.runtime import snapshot as snapshot_module
from megatron_ext.features.post_validation.runtime.partial_state import PartialState
from megatron_ext.features.post_validation.runtime.snapshot import CPU, Snapshot, choose_place

GIB = 2**30


def bits(tensor: torch.Tensor) -> list[int]:
    return list(tensor.detach().contiguous().reshape(-1).view(torch.uint8))


def test_tensors_come_back_bit_for_bit() -> None:
    """A snapshot restores tensors bit for bit: NaNs with a payload, signed zeros, scalars, empty
    tensors, a view and a trained tensor."""
    odd = torch.tensor([0x7FC12345, -0x80000000, 1], dtype=torch.int32).view(torch.float32)
    whole = torch.randn(4, 5)
    tensors = [
        odd,
        torch.randn(3, 2, requires_grad=True),
        torch.randn(7).bfloat16(),
        torch.tensor(3.0),
        torch.empty(0),
        whole.t()[1:3],
    ]
    before, rest = [bits(tensor) for tensor in tensors], whole.t()[3:].clone()
    snapshot = Snapshot()
    snapshot.keep(tensors)
    for _ in range(2):  # a snapshot may be restored more than once
        for tensor in tensors:
            tensor.detach().add_(1)
        assert [bits(tensor) for tensor in tensors] != before
        snapshot.restore()
        assert [bits(tensor) for tensor in tensors] == before
    assert torch.equal(whole.t()[3:], rest)


def test_mappings_come_back_with_their_keys_objects_and_contents() -> None:
    """A snapshot restores mappings with their keys, objects and contents. Adam adds its states in
    the first step, a loss scale is replaced, and a step counter is incremented."""
    old, new = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    moment = torch.zeros(2)
    state: dict[Any, Any] = defaultdict(dict, {old: {"exp_avg": moment, "step": 3}})
    group: dict[str, Any] = {"lr": torch.tensor(0.5), "weight_decay": 0.1, "params": [old, new]}
    rate, parameters = group["lr"], group["params"]
    snapshot = Snapshot()
    snapshot.keep([], [state, *state.values(), group])

    moment.add_(1)
    state[old] |= {"exp_avg": torch.ones(2), "step": 4, "exp_avg_sq": torch.ones(2)}
    state[new]["exp_avg"] = torch.ones(2)
    group["lr"].fill_(0.25)
    group |= {"weight_decay": 0.2, "step": 1}
    snapshot.restore()

    assert list(state) == [old] and new not in state
    assert state[old] == {"exp_avg": moment, "step": 3} and not moment.any()
    assert group == {"lr": rate, "weight_decay": 0.1, "params": parameters}
    assert rate == 0.5


def test_buffers_are_allocated_once_and_anew_for_other_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def counted(size: int, device: torch.device) -> torch.device:
        made.append(size)
        return device

    monkeypatch.setattr(snapshot_module, "choose_place", counted)
    snapshot = Snapshot()
    assert str(snapshot) == "nothing" and snapshot.size == 0
    tensors = [torch.randn(1000), torch.randn(3)]
    for _ in range(3):
        tensors[0].add_(1)
        snapshot.keep(tensors)
    assert made == [4096 + 512] == [snapshot.size]
    assert str(snapshot) == "4.5 KiB of host memory"
    state = torch.randn(1000)
    snapshot.keep([*tensors, state])
    assert made[1:] == [2 * 4096 + 512]
    expected = bits(state)
    state.zero_()
    snapshot.restore()
    assert bits(state) == expected


def test_what_the_host_has_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "available_bytes", lambda: GIB // 2)
    with pytest.raises(
        ValueError, match=r"takes 1 GiB of host memory.* only 0\.5 GiB are available: drop"
    ):
        Snapshot().keep([torch.empty(GIB // 4)])


def test_the_device_is_chosen_where_its_memory_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is on the device if enough memory is free there.

    Of 80 GiB the driver has 5 GiB free, and 15 GiB that torch reserved were never active at once.
    Of these 20 GiB the snapshot leaves 4 GiB free.

    The choice used to count allocated bytes instead of active ones. Allocated bytes omit messages
    whose owners have dropped them: 10 GiB here, which the snapshot would have taken from the
    messages of the next step.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 45 * GIB)
    statistics = {"allocated_bytes.all.peak": 45 * GIB, "active_bytes.all.peak": 55 * GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics)
    device = torch.device("cuda", 0)
    assert choose_place(16 * GIB, device) == device
    assert choose_place(16 * GIB + 1, device) == CPU
    assert choose_place(1000 * GIB, CPU) == CPU


def test_partial_states_add_up() -> None:
    state, other = PartialState(1.5, False), PartialState(2.0, True, tokens=3)
    assert state.plus(state) == PartialState(3.0, False)
    assert state.plus(other) == other.plus(state) == PartialState(3.5, True, tokens=3)
    assert math.isnan(state.plus(PartialState(math.nan, False)).squared_norm)
