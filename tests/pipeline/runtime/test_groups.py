"""Tests of the process groups that we create: on which ranks, how many, under which names and
settings."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d

from megatron_ext.compile.program.communicators import communicators
from megatron_ext.compile.program.graph import channels
from megatron_ext.compile.registry import choose
from megatron_ext.runtime.messages import groups as groups_module
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.runtime.messages.groups import make_groups
from megatron_ext.runtime.messages.nccl import communicator_options, ctas_for
from megatron_ext.schedule.problem import P2P, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from tests.helpers.ranks import run_ranks, values
from tests.unit.program.test_communicators import SPECS, program_of

CPU = torch.device("cpu")
needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")


# --- one process that creates groups of a large world without sending anything


@dataclasses.dataclass
class Made:
    """Process groups that a process has created: members by the group's name, and the number of
    calls of new_group."""

    members: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    calls: int = 0

    def counts(self) -> tuple[int, int]:
        return self.calls, len(self.members)


def noting(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Return a record of the process groups that this process creates from now on."""
    made = Made()
    helper, new_group = distributed_c10d._new_process_group_helper, dist.new_group

    def note_group(size: int, rank: int, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        group, store = helper(size, rank, ranks, *args, **kwargs)
        if isinstance(group, dist.ProcessGroup):
            assert group.group_name not in made.members
            made.members[group.group_name] = ranks
        return group, store

    def note_call(*args: Any, **kwargs: Any) -> Any:
        made.calls += 1
        return new_group(*args, **kwargs)

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", note_group)
    monkeypatch.setattr(dist, "new_group", note_call)
    return made


def large_world(rank: int, ranks: int) -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=ranks)


def pipeline_of(ranks: list[int]) -> dist.ProcessGroup:
    # torch's type stub requires a backend for these options, but the class accepts none.
    options: Any = FakeProcessGroup.Options
    group = dist.new_group(ranks, pg_options=options())
    assert isinstance(group, dist.ProcessGroup)
    return group


def test_a_rank_makes_no_group_that_it_is_no_member_of() -> None:
    """A rank creates only process groups that it is a member of. At 1,024 ranks, the 28 channels of
    the schedule zb-v used to take 3,584 calls of new_group on each rank. Megatron's own groups take
    5,713 calls, for 18 groups that a rank is a member of."""
    ranks, size, mine = 1024, 8, 500

    def run(_: int) -> dict[str, tuple[int, int]]:
        large_world(mine, ranks)
        counts = {}
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = noting(monkeypatch)
            parallel_state.initialize_model_parallel(4, size, create_gloo_process_groups=False)
            counts["Megatron's own"] = made.counts()
        global_ranks = parallel_state.get_pipeline_model_parallel_group()
        pipeline = pipeline_of(dist.get_process_group_ranks(global_ranks))
        for spec, vocabulary in (("1f1b", "none"), ("zb-v", "none"), ("zb-v", "2")):
            program = program_of(spec, size, vocabulary=VocabularyParallel(vocabulary))
            with pytest.MonkeyPatch.context() as monkeypatch:
                made = noting(monkeypatch)
                Channels(pipeline, channels(program.schedule), CPU)
                if vocabulary != "none":
                    Collectives(pipeline, CPU)
            assert all(mine in members for members in made.members.values())
            assert len(made.members) == communicators(program)[pipeline.rank()].total
            counts[f"{spec}, vocabulary {vocabulary}"] = made.counts()
        return counts

    (counts,) = values(run_ranks(1, run, connect=False))
    calls, members = counts.pop("Megatron's own")
    assert calls > 1000 and members > 10
    assert counts == {
        "1f1b, vocabulary none": (0, 4),
        "zb-v, vocabulary none": (0, 8),
        "zb-v, vocabulary 2": (0, 15),
    }


def test_no_two_channels_share_a_group() -> None:
    """For every schedule, on each rank of one to five, each channel has a process group of its own.
    On a shared group, a message that is not received yet would delay messages of another edge or
    kind."""

    def run(_: int) -> None:
        for ranks in range(1, 6):
            for spec in SPECS:
                ways = channels(Schedule(spec, choose(spec).place(ranks), ((),) * ranks))
                for rank in range(ranks):
                    check_channels_of(ways, rank, ranks)

    def check_channels_of(ways: set[Any], rank: int, ranks: int) -> None:
        large_world(rank, ranks)
        pipeline = pipeline_of(list(range(ranks)))
        with pytest.MonkeyPatch.context() as monkeypatch:
            made = noting(monkeypatch)
            ends = Channels(pipeline, ways, CPU)
        mine = {way for way in ways if rank in (way.sender, way.receiver)}
        assert set(ends._groups) == mine
        names = {way: group.group_name for way, group in ends._groups.items()}
        assert len(set(names.values())) == len(mine) == len(made.members)
        for way, name in names.items():
            assert made.members[name] == [way.sender, way.receiver]
        dist.destroy_process_group()

    values(run_ranks(1, run, connect=False))


# --- groups of two or three real ranks, over gloo


def test_torchs_own_groups_keep_their_names() -> None:
    """Groups that we create do not change the names of torch's groups. Ranks that are members of
    different numbers of our groups used to hang in the next call of new_group, because each gave
    the new group another name."""

    def run(rank: int) -> int:
        made = make_groups(whole_world(), {"a": [0, 1], "b": [1, 2], "c": [2, 1]}, "gloo")
        group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=60))
        assert isinstance(group, dist.ProcessGroup)
        dist.barrier(group)
        return len(made)

    assert values(run_ranks(3, run)) == [1, 3, 2]


def whole_world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def test_a_group_is_made_anew() -> None:
    """Groups that are created again for the same members work. Entries that an earlier group left
    in the store would lead the new one to closed sockets."""

    def run(rank: int) -> None:
        names = set()
        for _ in range(3):
            (group,) = make_groups(whole_world(), {"a": [1, 0]}, "gloo").values()
            assert group.rank() == 1 - rank and dist.get_process_group_ranks(group) == [1, 0]
            names.add(group.group_name)
            number = torch.tensor([rank])
            dist.all_reduce(number, group=group)
            assert number.item() == 1
            distributed_c10d._abort_process_group(group)
        assert len(names) == 3

    values(run_ranks(2, run))


# The device is bound after `init_process_group`, which would look for it; newer versions of torch
# refuse to bind a CPU.
BOUND = torch.device("cuda:0")


def test_in_a_world_that_is_bound_to_a_device(tmp_path: Path) -> None:
    """Our groups can be created in a world that is bound to a device. torch would split their
    communicator from the world's, in which all ranks of the world must take part, so a group would
    wait for ranks that are not its members."""

    def run(rank: int) -> None:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(tmp_path / "store"), 3),
            rank=rank,
            world_size=3,
        )
        dist.barrier()  # the barrier keeps rank 2 alive until the others have connected
        whole_world().bound_device_id = BOUND
        plugin = dist.Backend._plugins["GLOO"]
        split_from = []

        def create(options: Any, backend_options: Any) -> Any:
            split_from.append(options.split_from)
            return plugin.creator_fn(options, backend_options)

        dist.Backend._plugins["GLOO"] = plugin._replace(creator_fn=create)
        if rank < 2:  # rank 2 creates no group
            (group,) = make_groups(whole_world(), {"a": [0, 1]}, "gloo").values()
            number = torch.tensor([rank])
            dist.all_reduce(number, group=group)
            assert number.item() == 1
            assert split_from == [None]
            assert group.bound_device_id == BOUND
        assert whole_world().bound_device_id == BOUND

    values(run_ranks(3, run, connect=False))


# --- settings of NCCL communicators


@needs_nccl
def test_megatrons_settings_reach_our_communicators() -> None:
    """Our communicators get the settings of --nccl-communicator-config-path and
    --high-priority-stream-groups, which used to apply to Megatron's own groups only."""
    said = {"max_ctas": 6, "min_ctas": 3, "cga_cluster_size": 2, "net_name": "IB"}
    of_pipeline = parallel_state.get_nccl_options("pp", {"pp": {**said, **PRIORITY}})
    options = communicator_options(of_pipeline, 4)
    assert {name: getattr(options.config, name) for name in said} == said
    assert options.is_high_priority_stream
    assert options is not of_pipeline, "torch writes a group's name into its options"


PRIORITY = {"is_high_priority_stream": True}


@needs_nccl
@pytest.mark.parametrize(
    ("said", "ours", "expected"),
    [({}, 4, 4), ({"max_ctas": 32}, 4, 32), ({"min_ctas": 8}, 4, 8), ({"min_ctas": 2}, 4, 4)],
)
def test_few_ctas_unless_the_user_says_other(
    said: dict[str, int], ours: int, expected: int
) -> None:
    of_pipeline = parallel_state.get_nccl_options("pp", {"pp": said})
    assert communicator_options(of_pipeline, ours).config.max_ctas == expected


@needs_nccl
def test_nccl_is_left_alone_where_nothing_is_said() -> None:
    unset = dist.ProcessGroupNCCL.Options().config
    for of_pipeline in (dist.ProcessGroupNCCL.Options(), object()):
        options = communicator_options(of_pipeline, None)
        for name in ("max_ctas", "min_ctas", "cga_cluster_size", "net_name"):
            assert getattr(options.config, name) == getattr(unset, name)
        assert not options.is_high_priority_stream


@needs_nccl
def test_each_group_has_options_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of our groups gets a copy of the pipeline group's NCCL options. No options are passed if
    the world's backend for the device is not NCCL."""
    of_pipeline = dist.ProcessGroupNCCL.Options()
    of_pipeline.config.min_ctas = 1
    backend = SimpleNamespace(options=of_pipeline)
    pipeline: Any = SimpleNamespace(_get_backend=lambda device: backend)
    asked: list[Any] = []

    def note(pipeline: Any, members: Any, backend: str, options: Any = None) -> dict[Any, Any]:
        asked.append((backend, options))
        return {}

    monkeypatch.setattr(groups_module, "make_groups", note)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    for device in (torch.device("cuda", 0), CPU):
        groups_module.make_device_groups(pipeline, {}, device, 4)
    (nccl, options), gloo = asked
    assert nccl == "nccl" and gloo == ("gloo", None)
    first, second = options(), options()
    assert first is not second
    assert [made.config.max_ctas for made in (first, second)] == [4, 4]


def test_both_ends_use_equally_many_ctas() -> None:
    """All ranks use the same number of CTAs for their channels, that of the rank with the fewest to
    spare. NCCL splits a message over the CTAs in the same way at both ends; a rank with few
    channels, or on a larger device, would have chosen more."""
    program = program_of("zb-v", 4)

    def run(rank: int) -> int | None:
        device = SimpleNamespace(multi_processor_count=[132, 132, 114, 132][rank])
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
            assert ctas_for(program, whole_world(), CPU) is None
            return ctas_for(program, whole_world(), torch.device("cuda", 0))

    # 8 channels of 4 CTAs would be 32 of 114 multiprocessors
    assert values(run_ranks(4, run)) == [2] * 4


def test_batched_messages_need_no_communicator_of_ours() -> None:
    """No number of CTAs is computed for batched messages, which need no communicator of ours. On a
    GPU every training with batched messages used to loop for ever before its first step: without
    communicators, the number of CTAs was doubled until they would take enough of the device."""
    program = program_of("zb-v", 4, P2P.BATCHED)

    def run(rank: int) -> int | None:
        device = SimpleNamespace(multi_processor_count=132)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
            return ctas_for(program, whole_world(), torch.device("cuda", 0))

    assert values(run_ranks(4, run)) == [None] * 4
