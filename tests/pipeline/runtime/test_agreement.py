"""Tests that ranks that were launched with different settings say so before they create process
groups.

If flags or variables differ between nodes, rank 0 may have the schedule zb-h1 and rank 1 zb-v. The
two ranks used to create different groups, and each waited without a message for ranks that did not
come.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch.distributed as dist

from megatron_ext.adapter.rank_settings import launch_facts as launch_facts_module
from megatron_ext.adapter.rank_settings.launch_facts import (
    launch_facts,
    patience,
    refuse_other_launches,
)
from megatron_ext.config import ALLOW_UNKNOWN, PipelineConfig
from megatron_ext.runtime.store import agreement
from megatron_ext.runtime.store.agreement import (
    Fact,
    RankFacts,
    agree,
    deciding_differences,
    listed,
)
from tests.helpers.megatron_runs import SCRIPT, _train_rank, model_flags
from tests.helpers.ranks import RankResult, agent_store, run_ranks, values

pytestmark = pytest.mark.real_time

RANKS = 3
SECONDS = timedelta(seconds=2)
ALIKE = {"--pipeline-schedule": Fact("zb-h1"), "the file h.csv": Fact("9 bytes", "0123")}


def ask(told: Callable[[int], Mapping[str, Fact] | None], twice: bool = False) -> list[RankResult]:
    """Run ranks that compare the launch facts ``told`` returns, and return how they end: a rank's
    value is the difference it found. A rank without facts stays silent."""

    def asked(rank: int) -> str:
        store = dist.distributed_c10d._get_default_store()
        if (facts := told(rank)) is None:
            time.sleep((SECONDS + agreement.STAYS).total_seconds() + 1)
            return "silent"
        if twice:
            agree(store, rank, RANKS, ALIKE, SECONDS)
        try:
            agree(store, rank, RANKS, facts, SECONDS)
        except ValueError as error:
            return str(error)
        return ""

    return run_ranks(RANKS, asked)


@pytest.mark.parametrize("twice", [False, True])
def test_ranks_that_are_equal(twice: bool) -> None:
    assert values(ask(lambda rank: ALIKE, twice)) == [""] * RANKS


@pytest.mark.parametrize("twice", [False, True])
def test_every_rank_says_what_differs(twice: bool) -> None:
    other = ALIKE | {"--pipeline-schedule": Fact("zb-v")}
    results = values(ask(lambda rank: other if rank == 1 else ALIKE, twice))
    assert len(set(results)) == 1
    assert "--pipeline-schedule: zb-h1 on global ranks 0, 2 (" in results[0]
    assert "; zb-v on global rank 1 (" in results[0]
    assert "h.csv" not in results[0]


@pytest.mark.parametrize("silent", [0, 2])
def test_a_rank_without_megatron_ext_is_not_waited_for_in_silence(
    silent: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that starts without megatron_ext ends the job, and the error names that rank. The rank
    used to continue in Megatron's groups, and the other ranks waited for it until torch's timeout,
    whose error names no rank."""
    monkeypatch.setattr(agreement, "NOTICE", timedelta(seconds=0.5))
    monkeypatch.setattr(agreement, "STAYS", timedelta(seconds=1))
    results = values(ask(lambda rank: None if rank == silent else ALIKE))
    for rank, result in enumerate(results):
        if rank != silent:
            assert result.startswith(f"global rank {silent} did not tell")
    assert capfd.readouterr().out.count(f"waiting for global rank {silent} to tell") == 1


def test_a_rank_without_settings_is_not_waited_for_as_long_as_for_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a rank does not tell its settings, the ranks that wait for it end with an error, earlier
    than by torch's timeout of a collective. In a launch whose rank 0 had no settings of
    megatron_ext, the others used to wait 580 s for it, nearly torch's timeout."""
    monkeypatch.setattr(launch_facts_module, "patience", lambda timeout: timedelta(seconds=0.5))
    monkeypatch.setattr(agreement, "STAYS", timedelta(seconds=0.5))

    def launched(rank: int) -> str:
        if rank == 0:
            time.sleep(4)
            return "silent"
        try:
            refuse_other_launches(PipelineConfig.parse(schedule="zb-h1"))
        except ValueError as error:
            return str(error)
        return ""

    results = values(run_ranks(2, launched, timeout=60))
    assert results[0] == "silent"
    assert results[1].startswith("global rank 0 did not tell their settings within 0 s")
    assert "start every rank with the same command line" in results[1]
    assert "are still starting" in results[1]


@pytest.mark.parametrize(("timeout", "waited"), [(10, 5), (60, 30), (6, 5), (1, 1)])
def test_ranks_that_start_minutes_apart_are_waited_for(timeout: int, waited: int) -> None:
    """Ranks wait for the launch facts of the other ranks for half of the timeout of collectives, at
    most 30 minutes. A fixed limit of two minutes used to end valid jobs: on a cold file system
    ranks start further apart, and NCCL's init_process_group lets the first ranks continue without
    the late ones."""
    assert patience(timedelta(minutes=timeout)) == timedelta(minutes=waited)


def test_one_of_a_thousand_ranks_is_found() -> None:
    """Global rank 0 compares the launch facts of a thousand ranks, and finds the one rank with
    another flag, in less than a second."""
    ranks, prefix = 1000, "megatron_ext/agreement/1"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = {f"--argument-{n}": Fact(str(n)) for n in range(700)}
    for rank in range(1, ranks):
        facts = arguments if rank < ranks - 1 else arguments | {"--argument-3": Fact("zb-v")}
        text = json.dumps({name: asdict(fact) for name, fact in facts.items()})
        digest = hashlib.sha256(text.encode()).hexdigest()
        store.set(f"{prefix}/{digest}", text)
        store.set(f"{prefix}/{rank}", f"{digest} node{rank // 8}")
    # The key says that all ranks have read the result.
    store.set(f"{prefix}/{agreement._READ}", "")
    with pytest.raises(ValueError, match="zb-v on global rank 999"):
        agree(store, 0, ranks, arguments, SECONDS)


def test_ranks_and_hosts_are_listed_in_short() -> None:
    assert listed([3]) == "global rank 3"
    assert listed([0, 1, 2, 5, 7, 8]) == "global ranks 0-2, 5, 7-8"
    assert listed(range(0, 40, 2)).endswith(" and 12 more")
    ranks = [
        RankFacts(f"node{n // 8}", {"torch": Fact("2.9" if n < 1000 else "2.8")})
        for n in range(2000)
    ]
    text = deciding_differences(ranks)
    assert "2.9 on global ranks 0-999 (node0, node1" in text and "and 117 more)" in text
    assert len(text) < 600


def test_a_file_is_compared_by_its_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs files are compared between nodes by their contents, because nodes may have different
    copies under the same path. The time of the last change does not count."""
    facts: list[dict[str, Fact]] = []
    for node, figure in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / node).mkdir()
        monkeypatch.chdir(tmp_path / node)
        Path("costs.json").write_text(json.dumps({"f": figure}))
        os.utime("costs.json", (0, 86400 * len(facts)))
        facts.append(launch_facts(PipelineConfig.parse(schedule="zb-h1", costs="costs.json")))
    assert not deciding_differences([RankFacts("a", facts[0]), RankFacts("b", facts[1])])
    text = deciding_differences([RankFacts("a", facts[0]), RankFacts("c", facts[2])])
    assert "the file costs.json: 8 bytes, changed 1970-" in text


def test_a_folder_of_traces_may_be_each_ranks_own() -> None:
    one, other = (
        PipelineConfig.parse(schedule="zb-h1", trace=folder, trace_iters="2:3")
        for folder in ("a", "b")
    )
    assert launch_facts(one) == launch_facts(other)
    assert launch_facts(one)["--pipeline-trace-iters"].text == "2:3"
    untraced = PipelineConfig.parse(schedule="zb-h1")
    assert deciding_differences(
        [RankFacts("a", launch_facts(one)), RankFacts("b", launch_facts(untraced))]
    )


def test_unknown_sources_are_allowed_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that allows unknown versions of Megatron's sources must be set on all ranks or
    on none. If only some ranks had it, these ranks used to compare their first step with Megatron's
    own step, in which they waited for the other ranks."""
    facts = []
    for allowed in ("", "a.module:function@0123456789ab", "another.module:function@0123456789ab"):
        monkeypatch.setenv(ALLOW_UNKNOWN, allowed)
        facts.append(launch_facts(PipelineConfig.parse(schedule="zb-h1")))
    assert facts[1] == facts[2]
    text = deciding_differences([RankFacts("a", facts[0]), RankFacts("b", facts[1])])
    assert f"{ALLOW_UNKNOWN}: not given on global rank 0 (a); given on global rank 1 (b)" in text


def test_a_commit_while_ranks_start_is_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may report different commits in Megatron's version. The commit is that of the
    repository around Megatron, which may be the user's own, and may change while ranks start."""
    facts = []
    for version in ("0.19.2+0123abc", "0.19.2+4567def", "0.19.2", "0.19.1+0123abc"):
        monkeypatch.setattr(megatron.core, "__version__", version)
        facts.append(launch_facts(PipelineConfig.parse(schedule="zb-h1")))
    assert facts[0] == facts[1] == facts[2]
    text = deciding_differences([RankFacts("a", facts[0]), RankFacts("b", facts[3])])
    assert "Megatron: 0.19.2 on global rank 0 (a); 0.19.1 on global rank 1 (b)" in text


def test_a_launch_with_two_schedules_ends_at_once() -> None:
    flags = {
        rank: model_flags(pipeline_model_parallel_size=2, pipeline_schedule=schedule)
        for rank, schedule in enumerate(("zb-h1", "zb-v"))
    }

    def launched(rank: int, port: int) -> Any:
        return _train_rank(rank, 2, port, [str(SCRIPT), *flags[rank]], {}, None)

    with agent_store() as port:
        results = run_ranks(2, lambda rank: launched(rank, port), connect=False)
    for result in results:
        assert result.exit_code == 1 and result.seconds < 60
        text = "--pipeline-schedule: zb-h1 on global rank 0 ("
        assert text in result.error and "; zb-v on global rank 1 (" in result.error
