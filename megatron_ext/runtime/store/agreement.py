"""Check that all ranks run the same training, before they create process groups.

Ranks that create different groups would wait for each other silently. torch's store exists as soon
as init_process_group has returned: each rank writes its facts there once, global rank 0 compares
them, and the others wait for its verdict. A thousand ranks take about a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from megatron_ext.base.logger import logger
from megatron_ext.runtime.store.lost_store import losing_the_store

NOTICE = timedelta(seconds=30)  # waiting time after which a rank logs that it waits
# Longest time that global rank 0 waits until the other ranks have read its error.
STAYS = timedelta(seconds=10)

_SHOWN = 8  # largest number of rank ranges, hosts or values of a setting in a message
_LINES = 16  # largest number of differing settings in a message
_VERDICT, _READ = "verdict", "read by all"


@dataclass(frozen=True)
class Fact:
    """Setting of a rank that is compared with the other ranks.

    Ranks agree if their ``digest`` is equal, which covers more than ``text``, a short form for
    people. Without a digest the texts are compared. A difference ends the ranks if the fact
    ``decides``; otherwise it is only logged.
    """

    text: str
    digest: str = ""
    decides: bool = True


@dataclass(frozen=True)
class RankFacts:
    """Host of a rank, and the facts that the rank has reported for comparison."""

    host: str
    facts: Mapping[str, Fact]


def agree(
    store: dist.Store, rank: int, ranks: int, facts: Mapping[str, Fact], timeout: timedelta
) -> str:
    """Return a new name for this start of all ``ranks``, once all have reported equal ``facts``.

    Global rank 0 logs differences of facts that do not decide. Collective over the ranks.

    Raises:
        ValueError: two ranks differ, or a rank has not reported within ``timeout``; raised on every
            rank that calls this.
    """
    text = json.dumps({name: asdict(fact) for name, fact in facts.items()})
    digest = hashlib.sha256(text.encode()).hexdigest()
    with losing_the_store("the ranks were telling one another their settings"):
        # The prefix of keys contains a count, since an earlier training may have left keys in the
        # store.
        number = store.add(f"megatron_ext/agreement/asked by {rank}", 1)
        store = dist.PrefixStore(f"megatron_ext/agreement/{number}", store)
        # Ranks with equal facts share one entry in the store, under the digest of the facts.
        if not store.check([digest]):
            store.set(digest, text)
        store.set(str(rank), f"{digest} {socket.gethostname()}")
        compare = partial(_compare, store) if rank == 0 else partial(_read, store, rank)
        name, mistake = compare(ranks, timeout)
    if mistake:
        raise ValueError(mistake)
    return name


def _compare(store: dist.Store, ranks: int, timeout: timedelta) -> tuple[str, str]:
    """Compare the facts of all ranks on global rank 0, and tell the result to the other ranks.

    Returns a new name of this start, and the mistake; "" if there is none.
    """
    if _wait(store, [str(rank) for rank in range(ranks)], 0, ranks, timeout):
        told = _told(store, ranks)
        mistake = deciding_differences(told)
        if unknown := "" if mistake else other_differences(told):
            logger.warning(unknown)
    else:
        mistake = _silence(_silent(store, ranks), timeout)
    name = uuid.uuid4().hex
    store.set(_VERDICT, f"{name} {mistake}")
    if mistake:  # waits for the readers, as the store may end with this process
        with contextlib.suppress(RuntimeError):
            store.wait([_READ], STAYS)
    return name, mistake


def _read(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> tuple[str, str]:
    """Return the name of this start and the mistake that global rank 0 has told the other ranks.

    Waits for global rank 0.
    """
    # The other ranks wait longer than rank 0, so that rank 0, if it runs, times out first and names
    # the missing ranks.
    if not _wait(store, [_VERDICT], rank, ranks, timeout + STAYS):
        return "", _silence(_silent(store, ranks) or [0], timeout)
    name, mistake = store.get(_VERDICT).decode().split(" ", 1)
    if mistake and store.add("read", 1) == ranks - 1:
        store.set(_READ, "")
    return name, mistake


def _wait(store: dist.Store, keys: list[str], rank: int, ranks: int, timeout: timedelta) -> bool:
    """Return whether ``keys`` arrive in the store within ``timeout``.

    One of the waiting ranks logs a long wait.
    """
    at_first = min(NOTICE, timeout)
    with contextlib.suppress(RuntimeError):  # torch raises a RuntimeError when the time is over
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


def _told(store: dist.Store, ranks: int) -> list[RankFacts]:
    """Return the facts of all ranks; ranks with the same facts share one object."""
    digests, hosts = zip(
        *(store.get(str(rank)).decode().split(" ", 1) for rank in range(ranks)), strict=True
    )
    facts = {digest: _parsed(store.get(digest)) for digest in dict.fromkeys(digests)}
    return [RankFacts(host, facts[digest]) for digest, host in zip(digests, hosts, strict=True)]


def _parsed(text: bytes) -> dict[str, Fact]:
    return {name: Fact(**fact) for name, fact in json.loads(text).items()}


def deciding_differences(ranks: Sequence[RankFacts]) -> str:
    """Return the deciding facts in which ``ranks`` differ, a line for each; "" if there are none.

    A fact decides if ranks that differ in it must not train together.
    """
    lines = _lines(ranks, decide=True)
    if not lines:
        return ""
    return (
        f"the ranks of this job differ, and would wait for one another for ever, or train "
        f"different models:{lines}\nstart every rank with the same flags, variables, files and "
        f"versions"
    )


def other_differences(ranks: Sequence[RankFacts]) -> str:
    """Return a line for each fact in which ``ranks`` differ but may; "" if there are none."""
    lines = _lines(ranks, decide=False)
    if not lines:
        return ""
    return (
        f"the ranks differ in settings that megatron_ext does not know:{lines}\nif they decide "
        f"what is trained, give every rank the same"
    )


def _lines(ranks: Sequence[RankFacts], decide: bool) -> str:
    """Return a line for each fact in which ``ranks`` differ.

    With ``decide`` only facts that decide are compared, otherwise only the other facts.
    """
    groups: dict[int, list[int]] = defaultdict(list)  # ranks by the identity of their facts
    for rank, one in enumerate(ranks):
        groups[id(one.facts)].append(rank)
    if len(groups) == 1:
        return ""
    lines = []
    for name in dict.fromkeys(name for where in groups.values() for name in ranks[where[0]].facts):
        holders: dict[str, list[int]] = defaultdict(list)
        for where in groups.values():
            fact = ranks[where[0]].facts.get(name)
            if fact is not None and fact.decides is decide:
                holders[fact.digest or fact.text] += where
        if len(holders) > 1:
            lines.append(f"\n  {name}: {_values(ranks, name, holders)}")
    more = f"\n  and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
    return "".join(lines[:_LINES]) + more


def _values(ranks: Sequence[RankFacts], name: str, holders: Mapping[str, list[int]]) -> str:
    texts = [
        f"{ranks[where[0]].facts[name].text} on {listed(sorted(where))} ({_hosts(ranks, where)})"
        for where in holders.values()
    ]
    more = f"; and {len(texts) - _SHOWN} more values" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def listed(ranks: Sequence[int]) -> str:
    """Return ``ranks`` in words, given in ascending order, such as "global ranks 0-7, 12"."""
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
