"""Tests of schedules as CSV files: reading inverts writing exactly, and
torch.distributed.pipelining can load them."""

import itertools
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from megatron_ext.base import progress
from megatron_ext.base.progress import reporting
from megatron_ext.compile import size
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.verify import InvalidSchedule
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.flip import opens_on_first_rank
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import bitwise_order
from megatron_ext.schedule.schedule_csv import from_csv, to_csv
from tests.helpers.random_schedules import PROPERTY, Case, cases
from tests.helpers.schedules import (
    line_problem,
    names_of_stages,
    program,
    rows_of,
    with_messages,
    written,
)


def csv_of(name: str, p: int, m: int) -> str:
    return to_csv(program(name, line_problem(p, m)).schedule)


def test_text() -> None:
    assert csv_of("1f1b", 2, 3) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert csv_of("zb-h1", 2, 2) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_torchs_default_dump_is_read() -> None:
    """torch's default dump of a schedule can be read.

    Unless it is called with format="compute_only", torch also dumps its messages and the actions of
    FSDP. Reading such a file used to end in "'0UNSHARD' is no action".
    """
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in ("1f1b", "zb-h1"):
        table = csv_of(name, 2, 4)
        plain = {
            rank: [schedules._Action.from_str(cell) for cell in row.split(",")]
            for rank, row in enumerate(table.splitlines())
        }
        sharded = {rank: schedules._add_unshard_reshard(row) for rank, row in plain.items()}
        dumped = schedules._add_send_recv(sharded, lambda stage: stage, 2)
        rows = [",".join(map(str, row)) for row in dumped.values()]
        for action in ("0UNSHARD", "0RESHARD", "0SEND_F3", "0RECV_B0"):
            assert action in rows[0].split(",")
        assert to_csv(from_csv("\n".join(rows), "dump")) == table
    reduced = "0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n"
    assert to_csv(from_csv(reduced, "dump")) == "0F0,0B0\n1F0,1B0\n"


@PROPERTY
@given(cases)
def test_exact_inverse(case: Case) -> None:
    read = from_csv(to_csv(case.schedule), "random")
    assert read.name == "random"
    assert to_csv(read) == to_csv(case.schedule)
    # Schedules that open on the first rank are reversed when they are read.
    if not opens_on_first_rank(case.schedule.placement.rank_of):
        assert read.rows == case.schedule.rows
        assert read.placement.rank_of == case.schedule.placement.rank_of


@PROPERTY
@given(cases)
def test_messages_are_omitted(case: Case) -> None:
    assert to_csv(with_messages(case.schedule, case.problem)) == to_csv(case.schedule)


@pytest.mark.parametrize(
    "text",
    [
        "0F0,,,0B0\n,1F0,1B0,\n",
        " 0F0 , 0B0\r\n\t1F0,1B0\r\n",
        '"0F0","0B0"\n"1F0","1B0"',
        "0F0,0B0\n1F0,1B0",
        "0F0,,0B0\n,1F0,1B0,,,",
    ],
    ids=["idle", "space", "quoted", "no last newline", "ragged"],
)
def test_empty_cells_and_space_mean_nothing(text: str) -> None:
    assert from_csv(text, "x.csv").rows == rows_of("0F0 0B0\n1F0 1B0")


def test_placement_is_read_off_the_table() -> None:
    read = from_csv("1F0,2F0,2B0,1B0\n0F0,3F0,3B0,0B0\n", "v.csv")
    assert read.placement == Placement("file", (1, 0, 0, 1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1Q0\n", "x.csv, line 2: '1Q0' is not an action: write stage, kind"),
        ("0F0,0B0\n1F0 1B0\n", "x.csv, line 2: '1F0 1B0' is not an action"),
        ("0F0,0B0\n\n1F0,1B0\n", "x.csv, line 2 has no action"),
        ("0F0,0B0\n,,\n", "x.csv, line 2 has no action"),
        (
            "0F0,0B0\n2F0,2B0\n",
            "x.csv, line 2: 2F0 is of stage 2, but no action is of stage 1; these numbers",
        ),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0\n1F1,1B1\n",
            "x.csv, line 3 has no stage of its own: 1F1 is of stage 1, which is on line 2; all",
        ),
        ("", "x.csv has no action"),
        (",,\n", "x.csv, line 1 has no action"),
        (
            "0F0,0WAIT_F0,0B0\n1F0,1B0\n",
            "x.csv, line 1: 0WAIT_F0 is a message or a wait, not a pass; omit",
        ),
        ("0F0,0S0,0B0\n1F0,1B0\n", "x.csv, line 1: 0S0 is a pass of vocabulary parallelism"),
    ],
)
def test_bad_files(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        from_csv(text, "x.csv")
    assert message in str(refusal.value)


def test_an_error_lists_the_kinds_that_a_file_may_have() -> None:
    """The error lists the kinds of actions that a file may have. It used to list all thirty kinds,
    most of which are refused in a file."""
    for text in ("0f0,0B0\n", "0F0,0WAIT_B0,0B0\n", "0F0,0L0,0B0\n"):
        with pytest.raises(ValueError) as refusal:
            from_csv(text, "x.csv")
        _, _, kinds = str(refusal.value).partition("the kinds in a file are ")
        assert [kind[0] for kind in kinds.split(", ")] == ["F", "I", "W", "B", "R"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0,999999999999F0\n1F0,1B0\n",
            "line 1: 999999999999F0 is of stage 999999999999, but no action is of stage 2",
        ),
        (
            "0F0,0B0\n1F0,1B0,1F999999999999\n",
            "line 2: 1F999999999999 is of microbatch 999999999999, but no action is of microbatch",
        ),
        ("0F0,0B0,0F3\n1F0,1B0\n", "line 1: 0F3 is of microbatch 3, but no action is of microb"),
        (f"0F0,0B0,0F{'9' * 5000}\n", "line 1: "),
        (
            "0F0.0,0B0.0\n1F0.0,1B0.0,1F0.999999999\n",
            "line 2: an action is of slice 999999999, but no action is of slice 1; slices",
        ),
    ],
    ids=["stage", "microbatch", "small", "no int", "slice"],
)
def test_a_wrong_number_takes_no_memory(text: str, message: str, tmp_path: Path) -> None:
    """A wrong number in a schedule file is refused before it takes memory. Memory used to be
    allocated for that many stages, until the system killed the process without a message."""
    path = tmp_path / "typo.csv"
    path.write_text(text)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=re.escape(f"typo.csv, {message}")):
            choose(str(path))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_many_numbers_of_which_most_are_missing(tmp_path: Path) -> None:
    """A schedule file with many numbers but few of their combinations is refused.

    Each stage, microbatch and slice occurs, but not each combination of them. Memory used to be
    allocated for their product.
    """
    path = tmp_path / "diagonal.csv"
    path.write_text(",".join(f"{n}F{n}.{n}" for n in range(2000)) + "\n")
    with pytest.raises(
        ValueError,
        match=r"diagonal\.csv: 0F0\.1 is missing: 2000 actions are too few for 2000 stages and ",
    ):
        choose(str(path))


def test_a_table_that_this_machine_cannot_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table too large for this machine's memory is refused. Reading a table of 100 MB used to
    take minutes and all memory."""
    path = tmp_path / "large.csv"
    fits, too_large = csv_of("1f1b", 4, 64), csv_of("1f1b", 4, 65)
    monkeypatch.setattr(size, "_machine_bytes", lambda: 4 * 64 * size._BYTES)
    path.write_text(fits)
    assert choose(str(path)).ranks == 4
    path.write_text(too_large)
    with pytest.raises(ValueError, match=r"large\.csv \(about 260 passes of a kind\) takes about"):
        choose(str(path))
    path.write_text("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    monkeypatch.setattr(size, "_machine_bytes", lambda: 2 * size._BYTES)
    assert choose(str(path)).has_pairs


def test_reading_a_large_table_prints_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a large table prints progress. A table of 1.6 million actions used to be read for
    half a minute without a line of output."""
    monkeypatch.setattr(progress, "_LOOKS", 0.001)
    path = tmp_path / "table.csv"
    path.write_text(csv_of("1f1b", 8, 500))
    told: list[str] = []
    with reporting(told.append, first=0.0, every=0.0):
        choose(str(path))
    assert any(re.match(r"reading table\.csv, \d of 8; ", line) for line in told), told


# --- files of other programs


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n",
        b"\xef\xbb\xbf0F0;0F1;0B0;0B1;;\r\n1F0;1B0;;1F1;1B1;\r\n",
        b"0F0\t0F1\t0B0\t0B1\n1F0\t1B0\t1F1\t1B1\n\n",
        b'0F0;0F1;0B0;0B1\n1F0;"(1B0;1F1)OVERLAP_F_B";1B1\n',
        b"0F0,0F1,0B0,0B1\n1F0,(1B0;1F1)OVERLAP_F_B,1B1\n",
    ],
    ids=["byte order mark", "semicolons", "tabs", "semicolons and a compound", "compound"],
)
def test_files_as_spreadsheets_write_them(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "EXCEL.CSV"
    path.write_bytes(content)
    resolved = choose(str(path))
    assert (resolved.ranks, resolved.microbatches) == (2, 2)
    built = resolved.build(line_problem(2, 2))
    assert built.rows == rows_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "0F0,0B0\n".encode("utf-16"),
            "other.csv is not UTF-8 text (byte 0xff at position 0)",
        ),
        (b"0F0,0B0 \xe9\n", "other.csv is not UTF-8 text (byte 0xe9 at position 8)"),
        (b'0F0,"' + b"0" * 140_000, "line 1 is not a line of a CSV file: field larger than"),
        (b"", "other.csv has no action"),
    ],
    ids=["utf-16", "latin-1", "a field without end", "empty"],
)
def test_what_is_no_table_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        choose(str(path))


def test_a_table_has_no_options() -> None:
    with pytest.raises(ValueError, match=r"mine\.csv is a table and has no options: drop vpp=2"):
        choose("mine.csv:vpp=2")


def test_a_file_for_another_number_of_microbatches(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("0F0,0F1,0B0,0B1\n")
    with pytest.raises(ValueError, match=r"two\.csv is for 2 microbatches, and this step has 3"):
        choose(str(path)).build(line_problem(1, 3))


def test_a_stage_on_two_ranks_is_for_the_proof_to_refuse() -> None:
    schedule = from_csv("0F0,0B0,0F1\n1F0,1B0,1F1,1B1,0B1\n", "x.csv")
    problem = line_problem(2, 2)
    resolved = replace(choose("1f1b"), spec="x.csv", build=lambda problem: schedule)
    with pytest.raises(InvalidSchedule, match="0B1 is on rank 1; stage 0 is on rank 0"):
        build_program(resolved, problem)


def test_from_csv_of_a_family_is_the_family(tmp_path: Path) -> None:
    """The schedule of a family, written to a file and read from it, gives the same program."""
    problem = line_problem(4, 6)
    path = tmp_path / "zb.csv"
    path.write_text(csv_of("zb-h1", 4, 6))
    resolved = choose(str(path))
    assert resolved.traits.splits_backward
    assert build_program(resolved, problem).digest == program("zb-h1", problem).digest


@pytest.mark.parametrize(
    ("text", "in_order"),
    [
        ("0F0 0F1 0B0 0B1", True),
        ("0F0 0F1 0B1 0B0", False),
        ("0F1 0F0 0B0 0B1", False),
        ("0F0 0F1 0I0 0B1 0W0", False),  # 0B1 adds its weight gradient before 0W0 does
        ("0F0 0F1 0I0 0W0 0B1", True),
        ("0F0 0F1 0I0 0I1 0W0 0W1", True),
        ("0F0 0F1 0I0 0I1 0W1 0W0", False),
        ("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1", True),  # each stage has an order of its own
    ],
)
def test_bitwise_order(text: str, in_order: bool) -> None:
    assert bitwise_order(written(text, (0, 0))) is in_order


# --- how torch reads the files


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    return pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [
        (name, p, m)
        for name in entries()
        for p, m in [(1, 2), (2, 2), (4, 6)]
        # A search takes seconds, however small the problem.
        if not entries()[name].traits.searches or (name, p) == ("v-auto", 4)
    ],
)
def test_torch_loads_our_files(
    name: str, p: int, m: int, tmp_path: Path, torch_schedules: Any
) -> None:
    placement = choose(name).place(p)
    problem = Problem(placement, m, uniform(placement, 1, 1, 1))
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(program(name, problem).schedule))
    stages = names_of_stages(p, placement.chunks)
    runtime = torch_schedules._PipelineScheduleRuntime(stages, m)
    runtime._load_csv(str(path))  # checks the order, and inserts torch's own messages
    loaded = runtime.pipeline_order
    printed = [",".join(map(str, loaded[rank])) for rank in range(p)]
    assert printed == path.read_text().splitlines()
    assert runtime.stage_index_to_group_rank == dict(enumerate(placement.rank_of))


@settings(PROPERTY, max_examples=30)
@given(case=cases)
def test_torch_reads_each_cell_alike(torch_schedules: Any, case: Case) -> None:
    for action in itertools.chain(*case.schedule.rows):
        theirs = torch_schedules._Action.from_str(str(action))
        assert str(theirs) == str(action)
        assert theirs.stage_index == action.stage
        assert theirs.microbatch_index == action.microbatch


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("ScheduleInterleaved1F1B", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleavedZeroBubble", 2),
    ],
)
@pytest.mark.parametrize("p", [2, 4])
def test_torch_schedules_are_read_and_proved(
    name: str, chunks: int, p: int, tmp_path: Path, torch_schedules: Any
) -> None:
    """A schedule that torch writes, with its idle cells, is accepted by `prove`."""
    m = 2 * p
    schedule = getattr(torch_schedules, name)(names_of_stages(p, chunks), m)
    path = tmp_path / "torch.csv"
    schedule._dump_csv(str(path), format="compute_only")
    resolved = choose(str(path))
    placement = resolved.place(p)
    assert dict(enumerate(placement.rank_of)) == schedule.stage_index_to_group_rank
    problem = Problem(placement, m, uniform(placement, 1, 1, 1))
    proved = build_program(resolved, problem)
    assert [[str(action) for action in row] for row in proved.schedule.compute_rows] == [
        [str(action) for action in row if action is not None]
        for row in schedule.pipeline_order.values()
    ]


def test_gpipe_is_torchs(torch_schedules: Any) -> None:
    p, m = 3, 5
    theirs = torch_schedules.ScheduleGPipe(*names_of_stages(p, 1), m).pipeline_order
    passes = [[a for a in row if a is not None and a.is_compute_op] for row in theirs.values()]
    assert csv_of("gpipe", p, m).splitlines() == [",".join(map(str, row)) for row in passes]
