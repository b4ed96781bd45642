"""Whether all ranks mean the same training, asked before they make process groups for it.

Ranks that make different groups wait for one another without a word. torch's store is there as soon
as its init_process_group has returned: each rank writes there once, global rank 0 compares, and the
others wait for what it finds. So a thousand ranks take a second.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megatron_ext.logger import logger
from megatron_ext.runtime.store.lost_store import losing_the_store

NOTICE = timedelta(seconds=30)  # after which a wait is told
STAYS = timedelta(seconds=10)  # that global rank 0 waits for others to read of a mistake

_SHOWN = 8  # stretches of ranks, or hosts, that a message lists
_VERDICT, _READ = "verdict", "read by all"


@dataclass(frozen=True)
class Fact:
    """What a rank says of one subject. Ranks agree where the ``digest`` is the same: of what
    ``text``, for people, does not tell. Without one the text is compared."""

    text: str
    digest: str = ""


@dataclass(frozen=True)
class Told:
    """What a rank has told of itself."""

    host: str
    facts: Mapping[str, Fact]


def agree(
    store: dist.Store, rank: int, ranks: int, facts: Mapping[str, Fact], timeout: timedelta
) -> None:
    """Return when all ``ranks`` have told the same ``facts``. Collective over them.

    Raises:
        ValueError: two differ, or some rank has told nothing within ``timeout``; on every rank that
            asks.
    """
    told = json.dumps(asdict(Told(socket.gethostname(), facts)))
    with losing_the_store("the ranks were telling one another their settings"):
        # What an earlier training has left in the store is not to be met.
        number = store.add(f"megatron_ext/agreement/asked by {rank}", 1)
        store = dist.PrefixStore(f"megatron_ext/agreement/{number}", store)
        store.set(str(rank), told)
        compare = partial(_compare, store) if rank == 0 else partial(_read, store, rank)
        mistake = compare(ranks, timeout)
    if mistake:
        raise ValueError(mistake)


def _compare(store: dist.Store, ranks: int, timeout: timedelta) -> str:
    """On global rank 0: what is wrong, and "" where nothing is. The others are told."""
    if _wait(store, [str(rank) for rank in range(ranks)], 0, ranks, timeout):
        mistake = difference([_told(store.get(str(rank))) for rank in range(ranks)])
    else:
        mistake = _silence(_silent(store, ranks), timeout)
    store.set(_VERDICT, mistake)
    if mistake:  # the store may end with this process
        with contextlib.suppress(RuntimeError):
            store.wait([_READ], STAYS)
    return mistake


def _read(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """On the other ranks: what global rank 0 has found."""
    # It gives up first, if it is there, and says for whom it has waited.
    if not _wait(store, [_VERDICT], rank, ranks, timeout + STAYS):
        return _silence(_silent(store, ranks) or [0], timeout)
    mistake: str = store.get(_VERDICT).decode()
    if mistake and store.add("read", 1) == ranks - 1:
        store.set(_READ, "")
    return mistake


def _wait(store: dist.Store, keys: list[str], rank: int, ranks: int, timeout: timedelta) -> bool:
    """Whether ``keys`` come within ``timeout``. One of the ranks that wait says so meanwhile."""
    at_first = min(NOTICE, timeout)
    with contextlib.suppress(RuntimeError):  # which is torch's for too late
        store.wait(keys, at_first)
        return True
    here = str(rank)
    if store.compare_set("who says it", "", here).decode() == here:
        logger.warning(
            f"waiting for {listed(_silent(store, ranks))} to tell their settings: are they still "
            f"starting, and has every rank the same command line, with megatron_ext? This is an "
            f"error in "
            f"{(timeout - at_first).total_seconds():.0f} s"
        )
    with contextlib.suppress(RuntimeError):
        store.wait(keys, max(timeout - at_first, timedelta(milliseconds=1)))
        return True
    return False


def _silent(store: dist.Store, ranks: int) -> list[int]:
    return [rank for rank in range(ranks) if not store.check([str(rank)])]


def _silence(ranks: Sequence[int], timeout: timedelta) -> str:
    return (
        f"{listed(ranks)} did not tell their settings within {timeout.total_seconds():.0f} s: they "
        f"train without megatron_ext or without its flags, have ended, or are still starting; "
        f"start every rank with the same command line, and if a slow file system lets some start "
        f"that late, raise --distributed-timeout-minutes: half of it is waited for"
    )


def _told(text: bytes) -> Told:
    told = json.loads(text)
    facts = {name: Fact(**fact) for name, fact in told["facts"].items()}
    return Told(told["host"], facts)


def difference(ranks: Sequence[Told]) -> str:
    """What of the facts of all ``ranks`` differs, a line for each; "" where nothing does."""
    lines = []
    for name in dict.fromkeys(name for told in ranks for name in told.facts):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, told in enumerate(ranks):
            if (fact := told.facts.get(name)) is not None:
                holders[fact.digest or fact.text].append(rank)
        if len(holders) > 1:
            values = "; ".join(
                f"{ranks[where[0]].facts[name].text} on {listed(where)} ({_hosts(ranks, where)})"
                for where in holders.values()
            )
            lines.append(f"\n  {name}: {values}")
    if not lines:
        return ""
    return (
        f"the ranks of this job differ, and would wait for one another for ever:{''.join(lines)}\n"
        f"start every rank with the same flags, variables, files and versions"
    )


def listed(ranks: Sequence[int]) -> str:
    """``ranks``, in ascending order, in words: "global ranks 0-7, 12"."""
    stretches: list[list[int]] = []
    for rank in ranks:
        if stretches and stretches[-1][-1] == rank - 1:
            stretches[-1][1:] = [rank]
        else:
            stretches.append([rank])
    texts = ["-".join(map(str, stretch)) for stretch in stretches]
    return f"global rank{'s' * (len(ranks) > 1)} {_some(texts)}"


def _hosts(ranks: Sequence[Told], where: Iterable[int]) -> str:
    return _some([*dict.fromkeys(ranks[rank].host for rank in where)])


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
