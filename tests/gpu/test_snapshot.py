"""Tests of snapshots of the state that a step overwrites, on a GPU or in pinned memory of its host.

The case on the CPU runs everywhere and shows that the test itself works. The cases on a GPU have
not run yet.
"""

from __future__ import annotations

import pytest
import torch

from megatron_ext.features.post_validation.runtime import snapshot as snapshot_module
from megatron_ext.features.post_validation.runtime.snapshot import CPU, Snapshot

NUMBERS = 2**24

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU"),
]


@pytest.mark.parametrize(
    ("device", "place", "words"),
    [
        ("cpu", "cpu", "128 MiB of host memory"),
        pytest.param("cuda", "cuda", "128 MiB of the device's memory", marks=ON_GPU),
        pytest.param("cuda", "cpu", "128 MiB of pinned host memory", marks=ON_GPU),
    ],
)
def test_copies_are_exact_though_nothing_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, device: str, place: str, words: str
) -> None:
    """Snapshots are exact although the host does not wait for their copies: tensors are overwritten
    at once, while copies to and from the host are still running. Adam's count of steps is on the
    host in any case."""
    if place != device:
        monkeypatch.setattr(snapshot_module, "choose_place", lambda size, device: CPU)
    main, moment = (torch.randn(NUMBERS, device=device) for _ in "12")
    count = torch.tensor(3.0)
    snapshot = Snapshot()
    for _ in range(3):
        main.add_(1)
        expected = main.clone(), moment.clone(), count.clone()
        snapshot.keep([main, moment, count])
        for tensor in (main, moment, count):
            tensor.mul_(0.5)
        snapshot.restore()
        restored = main.clone(), moment.clone(), count.clone()
        for tensor in (main, moment, count):
            tensor.zero_()
        assert all(map(torch.equal, restored, expected))
    assert str(snapshot).startswith(words)
