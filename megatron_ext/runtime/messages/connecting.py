"""Connections that are made only once all their ranks have come.

A process group connects in one call of torch's. If a rank never comes, the call blocks until
torch's timeout, and no other thread can end it. So the ranks meet in torch's store before the call:
a rank that waits there knows which ranks are missing, and notices that another rank has failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from megatron_ext.runtime.messages.groups import timeout_of
from megatron_ext.runtime.messages.peer_call import PeerCall, PeerFailure
from megatron_ext.runtime.rank_identity import rank_identity
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.store.agreement import listed
from megatron_ext.runtime.store.lost_store import losing_the_store
from megatron_ext.runtime.store.start import keys_of_start
from megatron_ext.runtime.world import store_of_all

_LONGEST_PAUSE = 0.2  # longest pause in seconds between two polls of the store


@contextlib.contextmanager
def connecting(
    recorder: Recorder, group: dist.ProcessGroup, name: str, ends: Sequence[int] = ()
) -> Iterator[None]:
    """Context in which the ranks of a connection connect, entered when all of them have come.

    The ranks are those of ``group``, or the two pipeline ranks ``ends`` of a pipeline's group.
    ``name`` names the connection. Collective over these ranks.

    Raises:
        PeerFailure: another rank has failed meanwhile, or does not come within the group's timeout.
    """
    peer, direction = 0, "with"
    if ends:
        peer, direction = next(end for end in ends if end != recorder.rank), "to"
    was_in_step, recorder.in_step = recorder.in_step, True
    try:
        with PeerCall(recorder, f"the connection {name}", peer, direction):
            _meet(recorder, group, name, ends or range(group.size()))
            yield
    except BaseException as error:
        if not recorder.has_failed:
            recorder.failed(error, f"the connection {name}")
        raise
    finally:
        recorder.in_step = was_in_step


def exchange_identities(recorder: Recorder, pipeline: dist.ProcessGroup) -> None:
    """Exchange the identities (processes and hosts) of the ranks of ``pipeline``.

    Collective over these ranks.
    """
    with connecting(recorder, pipeline, "of the pipeline"):
        recorder.rank_identity = rank_identity(pipeline)


def _meet(recorder: Recorder, group: dist.ProcessGroup, name: str, members: Sequence[int]) -> None:
    """Wait until all ``members`` of ``group`` have come to the connection ``name``.

    Raises PeerFailure if another rank has failed, or does not come within the group's timeout.
    """
    store, position = store_of_all(), recorder.position
    if store is None:  # a job of one rank has no store
        return
    assert position is not None
    of_group = dist.get_process_group_ranks(group)
    this_rank, ranks = of_group[group.rank()], [of_group[member] for member in members]
    store = keys_of_start(store)
    missing, timeout = ranks, timeout_of(group).total_seconds()
    end, pause = time.monotonic() + timeout, 0.001
    with losing_the_store(f"global rank {this_rank} was to make the connection {name}"):
        place = f"megatron_ext/connection {name} of {'-'.join(map(str, ranks))}"
        # The key contains a count, since an earlier training may have left keys in the store. All
        # ranks have made the connection equally often, so their counts agree.
        place = f"{place}/{store.add(f'{place}/begun by {this_rank}', 1)}"
        store.set(f"{place}/{this_rank}", "")
    while True:
        if recorder.interruption is not None:
            # The context manager around this function adds the name of the failed rank to this
            # error.
            raise PeerFailure("another rank has failed")
        with losing_the_store(f"{listed(missing)} had not come to the connection {name}"):
            missing = [rank for rank in missing if not store.check([f"{place}/{rank}"])]
        if not missing:
            break
        recorder.position = position._replace(missing=tuple(missing))
        if time.monotonic() > end:
            raise PeerFailure(
                f"pipeline rank {recorder.rank} was waiting for the connection {name}, to which "
                f"{listed(missing)} did not come within {timeout:.0f} s "
                f"{recorder.rank_identity.note()}"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    recorder.position = position._replace(
        missing=tuple(rank for rank in ranks if rank != this_rank)
    )
