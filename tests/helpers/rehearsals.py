"""Rehearsals of single ranks of a small GPT, each in a fork of the tests' process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.rehearsal.rank import rehearse_rank
from megatron_ext.rehearsal.record import RankRecord
from megatron_ext.rehearsal.request import RankRequest
from tests.helpers.megatron_runs import SCRIPT, take_prepared_parsers
from tests.helpers.ranks import RankResult, run_ranks, values


def rehearsed(rank: int, ranks: int, flags: Sequence[str], **settings: Any) -> RankRecord:
    """The record of ``rank`` of ``ranks``, after a step of warm-up; fails unless it ends well.
    ``settings``: as `rehearsed_or_fail` takes them."""
    record: RankRecord = values([rehearsed_or_fail(rank, ranks, flags, **settings)])[0]
    return record


def rehearsed_or_fail(
    rank: int,
    ranks: int,
    flags: Sequence[str],
    script: Path = SCRIPT,
    neighbour: Path | None = None,
    folder: Path | None = None,
    steps: int = 1,
    **settings: Any,
) -> RankResult:
    """`rehearsed` for a rank that may end badly: how it ends. ``settings``: more of its request."""
    with tempfile.TemporaryDirectory() as own:
        request = RankRequest(
            *(rank, ranks, str(script), tuple(flags), folder or Path(own)),
            warm_up=1,
            steps=steps,
            is_cpu=True,
            neighbour=neighbour,
            **settings,
        )

        def run(_: int) -> RankRecord:
            take_prepared_parsers()
            return rehearse_rank(request)

        return run_ranks(1, run, connect=False)[0]
