"""Tests of V placements that open on rank 0, as torch.distributed.pipelining writes them: they are
reversed into this project's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.verify import InvalidSchedule
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.flip import opens_on_first_rank
from megatron_ext.schedule.placement import line, loop, v, wave
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.schedule_csv import from_csv, to_csv, to_torch_csv
from tests.helpers.schedules import line_problem, names_of_stages, rows_of


def proved(schedule: Schedule, m: int, path: Path) -> Schedule:
    """Write ``schedule`` to ``path``, read it, and return it with its messages."""
    path.write_text(to_csv(schedule))
    resolved = choose(str(path))
    placement = resolved.place(len(schedule.rows))
    problem = Problem(placement, m, uniform(placement, 1, 1, 1))
    return build_program(resolved, problem).schedule


@pytest.mark.parametrize("p", [2, 3, 8])
def test_which_placements_open_on_rank_0(p: int) -> None:
    down = tuple(range(p))
    assert opens_on_first_rank(down + down[::-1])
    assert opens_on_first_rank((down + down[::-1]) * 3)
    assert not opens_on_first_rank(down + down[::-1] + down)
    for placement in (line(p), loop(p), v(p), wave(p)):
        assert not opens_on_first_rank(placement.rank_of)


def test_one_rank_has_no_other_end() -> None:
    assert not opens_on_first_rank((0, 0))


def test_flipped_on_the_way_in_and_back_on_the_way_out(tmp_path: Path) -> None:
    text = "0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"
    read = from_csv(text, "v.csv")
    assert read.rows == rows_of("1F0 2F0 2B0 1B0\n0F0 3F0 3B0 0B0")
    assert read.placement.rank_of == v(2).rank_of
    assert to_csv(read) == text
    # the table of a proved program has no messages
    assert to_csv(proved(read, 1, tmp_path / "v.csv")) == text


def test_ours_is_left_as_it_is() -> None:
    text = "1F0,2F0,2B0,1B0\n0F0,3F0,3B0,0B0\n"
    read = from_csv(text, "v.csv")
    assert read.rows == rows_of("1F0 2F0 2B0 1B0\n0F0 3F0 3B0 0B0")
    assert to_csv(read) == text


def test_a_compound_is_its_parts_in_order() -> None:
    read = from_csv('0F0, (0F1;0B0)OVERLAP_F_B ,0B1\n"1F0",1B0,(1F1;1B1)OVERLAP_F_B\n', "x.csv")
    assert read.rows == rows_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


@pytest.mark.parametrize("cell", ["(0F1;0Q0)OVERLAP_F_B", "()OVERLAP_F_B", "(0F1;0B0)", "(0F1"])
def test_a_bad_compound_is_named(cell: str) -> None:
    with pytest.raises(ValueError, match=r"x\.csv, line 1: .* is not an action"):
        from_csv(f"0F0,{cell}\n", "x.csv")


# --- how torch reads the files


@pytest.fixture(scope="module")
def torch_schedules() -> Any:
    return pytest.importorskip(
        "torch.distributed.pipelining.schedules", reason="torch is not installed"
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("ScheduleZBVZeroBubble", "zb-v"), ("ScheduleDualPipeV", "dualpipe-v")],
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 7), (4, 8), (8, 20)])
def test_torchs_v_is_flipped_and_proved(
    theirs: str, ours: str, p: int, m: int, tmp_path: Path, torch_schedules: Any
) -> None:
    """torch's V schedules, reversed, are the published ones and equal this project's own, pass by
    pass."""
    table = getattr(torch_schedules, theirs)(names_of_stages(p, 2), m)
    path = tmp_path / "torch.csv"
    table._dump_csv(str(path), format="compute_only")
    read = from_csv(path.read_text(), path.name)
    assert read.placement.rank_of == v(p).rank_of
    problem = Problem(v(p), m, uniform(v(p), 1, 1, 1))
    assert read.rows == choose(ours).build(problem).rows
    assert read.rows == choose(theirs).build(problem).rows  # torch's name is an alias
    assert proved(read, m, tmp_path / "read.csv").compute_rows == read.rows


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "1f1b-v", "dualpipe-v", "hanayo"])
def test_ours_are_loaded_by_torch(name: str, tmp_path: Path, torch_schedules: Any) -> None:
    p, m = 4, 6
    placement = choose(name).place(p)
    schedule = choose(name).build(Problem(placement, m, uniform(placement, 1, 1, 1)))
    path = tmp_path / "ours.csv"
    path.write_text(to_csv(schedule))
    runtime = torch_schedules._PipelineScheduleRuntime(names_of_stages(p, placement.chunks), m)
    runtime._load_csv(str(path))  # checks the order, and inserts torch's own messages
    assert runtime.stage_index_to_group_rank == dict(enumerate(placement.rank_of))


@pytest.mark.parametrize(
    ("spec", "style"),
    [
        ("zb-v", "v"),
        ("v-half", "v"),
        ("hanayo", "v"),
        ("hanayo:waves=1", "v"),
        ("zb-h1", "loop"),
        ("interleaved-zb:vpp=3", "loop"),
    ],
)
def test_a_table_for_torch_has_torchs_placement(
    spec: str, style: str, tmp_path: Path, torch_schedules: Any
) -> None:
    """A table written for torch has torch's placement. torchtitan builds the stages of a rank by
    this placement, whatever the table says."""
    p, m = 4, 8
    placement = choose(spec).place(p)
    schedule = choose(spec).build(Problem(placement, m, uniform(placement, 1, 1, 1)))
    path = tmp_path / "torch.csv"
    path.write_text(to_torch_csv(schedule))
    runtime = torch_schedules._PipelineScheduleRuntime(names_of_stages(p, placement.chunks), m)
    runtime._load_csv(str(path))
    theirs = torch_schedules.generate_stage_to_rank_mapping(p, placement.stages, style=style)
    assert runtime.stage_index_to_group_rank == theirs
    read = from_csv(path.read_text(), spec)
    assert (read.rows, read.placement.rank_of) == (schedule.rows, placement.rank_of)
    assert to_torch_csv(read) == path.read_text()


def test_slices_are_refused() -> None:
    """A table with slices of sequences is not written for torch, which would read 0F0.1 as 0F0
    without an error."""
    schedule = from_csv("0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0\n", "slices.csv")
    with pytest.raises(ValueError, match=r"no slices of a microbatch, and would take 0F0\.0"):
        to_torch_csv(schedule)


def test_what_torch_does_not_know_is_refused() -> None:
    schedule = from_csv("0F0,0R0,0B0\n1F0,1B0\n", "again.csv")
    with pytest.raises(ValueError, match=r"torch.* has no pass like 0R0 .*: it has F, I, W and B"):
        to_torch_csv(schedule)


def test_a_flipped_file_goes_back_to_torch(tmp_path: Path, torch_schedules: Any) -> None:
    table = torch_schedules.ScheduleZBVZeroBubble(names_of_stages(4, 2), 8)
    path = tmp_path / "torch.csv"
    table._dump_csv(str(path), format="compute_only")
    path.write_text(to_csv(from_csv(path.read_text(), path.name)))
    runtime = torch_schedules._PipelineScheduleRuntime(names_of_stages(4, 2), 8)
    runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == table.stage_index_to_group_rank


def test_torchs_1f1b_lacks_a_forward(torch_schedules: Any) -> None:
    """torch's own table for 1F1B lacks a forward pass.

    It numbers the forward passes of the last rank from 1, so with eight microbatches it has 3F8
    instead of 3F0. torch neither runs nor checks this table.
    """
    p, m = 4, 8
    order = torch_schedules.Schedule1F1B(*names_of_stages(p, 1), m)._get_pipeline_order()
    rows = [[str(a) for a in row if a is not None and a.is_compute_op] for row in order.values()]

    def refusal(rows: list[list[str]]) -> str:
        schedule = from_csv("\n".join(map(",".join, rows)), "torch.csv")
        with pytest.raises(InvalidSchedule) as refused:
            build_program(
                replace(choose("1f1b"), build=lambda problem: schedule), line_problem(p, m)
            )
        return str(refused.value)

    assert "3F8 is of microbatch 8, and the microbatches are 0 to 7; 3F0 is missing" in refusal(
        rows
    )
    rows[-1].remove("3F8")
    assert "3F0 is missing on rank 3: nothing does the forward" in refusal(rows)
