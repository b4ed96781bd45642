"""Check that all ranks run the same training, before they create process groups for it.

Ranks that create different groups would wait for each other silently. torch's store exists as soon
as init_process_group has returned: each rank writes its facts there once, global rank 0 compares
them, and the others wait for its verdict. A thousand ranks take about a second.
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

NOTICE = timedelta(seconds=30)  # after which a wait is logged
STAYS = timedelta(seconds=10)  # that global rank 0 waits until others have read a mistake

_SHOWN = 8  # ranges of ranks, or hosts, that a message lists
_VERDICT, _READ = "verdict", "read by all"


@dataclass(frozen=True)
class Fact:
    """Setting of a rank. Ranks agree if their ``digest`` is equal, which covers more than ``text``,
    meant for people, can tell. Without a digest the texts are compared."""

    text: str
    digest: str = ""


@dataclass(frozen=True)
class RankFacts:
    """Host and facts that a rank has reported."""

    host: str
    facts: Mapping[str, Fact]


def agree(
    store: dist.Store, rank: int, ranks: int, facts: Mapping[str, Fact], timeout: timedelta
) -> None:
    """Return when all ``ranks`` have reported the same ``facts``. Collective over them.

    Raises:
        ValueError: two ranks differ, or a rank has not reported within ``timeout``; raised on every
            rank that calls this.
    """
    text = json.dumps(asdict(RankFacts(socket.gethostname(), facts)))
    with losing_the_store("the ranks were telling one another their settings"):
        # A number of its own: the store may have keys of an earlier training.
        number = store.add(f"megatron_ext/agreement/asked by {rank}", 1)
        store = dist.PrefixStore(f"megatron_ext/agreement/{number}", store)
        store.set(str(rank), text)
        compare = partial(_compare, store) if rank == 0 else partial(_read, store, rank)
        mistake = compare(ranks, timeout)
    if mistake:
        raise ValueError(mistake)


def _compare(store: dist.Store, ranks: int, timeout: timedelta) -> str:
    """Compare the facts on global rank 0, tell the other ranks, and return the mistake; "" if there
    is none."""
    if _wait(store, [str(rank) for rank in range(ranks)], 0, ranks, timeout):
        mistake = difference([_parsed(store.get(str(rank))) for rank in range(ranks)])
    else:
        mistake = _silence(_silent(store, ranks), timeout)
    store.set(_VERDICT, mistake)
    if mistake:  # the store may end with this process
        with contextlib.suppress(RuntimeError):
            store.wait([_READ], STAYS)
    return mistake


def _read(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> str:
    """Return the mistake that global rank 0 has found, on the other ranks."""
    # Rank 0, if it is there, times out first and says for whom it has waited.
    if not _wait(store, [_VERDICT], rank, ranks, timeout + STAYS):
        return _silence(_silent(store, ranks) or [0], timeout)
    mistake: str = store.get(_VERDICT).decode()
    if mistake and store.add("read", 1) == ranks - 1:
        store.set(_READ, "")
    return mistake


def _wait(store: dist.Store, keys: list[str], rank: int, ranks: int, timeout: timedelta) -> bool:
    """Whether ``keys`` arrive within ``timeout``. One of the waiting ranks logs the wait
    meanwhile."""
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


def _parsed(text: bytes) -> RankFacts:
    data = json.loads(text)
    facts = {name: Fact(**fact) for name, fact in data["facts"].items()}
    return RankFacts(data["host"], facts)


def difference(ranks: Sequence[RankFacts]) -> str:
    """Return the facts in which ``ranks`` differ, a line for each; "" if they are equal."""
    lines = []
    for name in dict.fromkeys(name for one in ranks for name in one.facts):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank, one in enumerate(ranks):
            if (fact := one.facts.get(name)) is not None:
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
    """Return ``ranks``, in ascending order, in words: "global ranks 0-7, 12"."""
    stretches: list[list[int]] = []
    for rank in ranks:
        if stretches and stretches[-1][-1] == rank - 1:
            stretches[-1][1:] = [rank]
        else:
            stretches.append([rank])
    texts = ["-".join(map(str, stretch)) for stretch in stretches]
    return f"global rank{'s' * (len(ranks) > 1)} {_some(texts)}"


def _hosts(ranks: Sequence[RankFacts], where: Iterable[int]) -> str:
    return _some([*dict.fromkeys(ranks[rank].host for rank in where)])


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
