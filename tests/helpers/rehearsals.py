"""Rehearsals of single ranks of a small GPT, each in a fork of the test process."""

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
    """Return the record of ``rank`` of ``ranks`` after a warm-up step, and fail unless the rank
    ends well. ``settings`` are those of `rehearsed_or_fail`."""
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
    """Rehearse a rank, and return how it ended, also if it failed. ``settings`` are further fields
    of its request."""
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
