"""Tests of memory that several device streams use, on emulated streams (`tests.helpers.streams`).

By day the cases together use each feature once, at night each family with each setting.
`tests.stream_faults` removes our waits one at a time, and says whether a case notices.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.runtime.host.copies import _Event
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.streams.cases import AT_NIGHT, CASES, night_cases
from tests.helpers.streams.engine import TELLS_OF_NODES
from tests.helpers.streams.faults import HOST_WAITS, calls, sites
from tests.helpers.streams.findings import FOUND
from tests.stream_faults import UNSEEN, seen

pytestmark = pytest.mark.skipif(
    not TELLS_OF_NODES, reason="this torch does not tell when a node of autograd is made"
)

RUN = CASES | (AT_NIGHT | night_cases() if IS_NIGHT else {})


@pytest.mark.parametrize("name", RUN)
def test_all_accesses_are_ordered(name: str) -> None:
    RUN[name].run_emulated()


def test_memory_of_offloaded_storages() -> None:
    """The emulated streams find two former defects, whose fixes are removed here. No run on a CPU
    or with one stream had shown them, and both gave wrong numbers without an error. Reloaded
    activations used to be freed for the next pass while the stream of the shared experts still read
    them. Memory to which no tensor refers any more used to be given to the next pass while a copy
    from the host still wrote to it."""
    allocator, unread = (
        next(fault for name, fault in seen().items() if part in name)
        for part in ("_tell_allocator", "storages that no tensor refers to")
    )
    with allocator, unread, pytest.raises(AssertionError, match=FOUND) as error:
        CASES["zb-h1, experts, shared ones on a stream of theirs, offload full"].run_emulated()
    assert "while aten::gelu_backward of GeluBackward0 in 0I1 on stream" in str(error.value)
    assert "while aten::copy_ in 0RELOAD_F1 on the stream of copies FROM_HOST" in str(error.value)


# --- waits of streams that are removed as seeded faults


def test_each_wait_that_is_not_seen_is_there() -> None:
    """The waits whose removal no case on emulated streams notices are listed, and each listed wait
    still exists in the code. At most 10 % of the waits may be in the list."""
    names = [str(site) for site in sites()]
    assert set(UNSEEN) <= set(names)
    assert len(set(names)) == len(names)
    assert len(UNSEEN) <= len(names) / 10
    assert set(HOST_WAITS) <= {(call.file, call.function) for call in calls()}


def test_faults_can_be_seeded() -> None:
    for fault in seen().values():
        # Transformer Engine may not be installed
        with contextlib.suppress(ModuleNotFoundError), fault:
            pass


def test_a_wait_that_is_taken_out_lets_no_stream_wait() -> None:
    copies = "megatron_ext/runtime/host/copies.py _Event.wait"
    (site,) = [site for site in sites() if str(site).startswith(copies)]
    told: list[object] = []
    event: Any = SimpleNamespace(event=None)
    stream = SimpleNamespace(wait_event=told.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        with site.taken_out():
            _Event.wait(event)
        assert not told
        _Event.wait(event)
    assert told == [None]
