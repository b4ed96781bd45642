"""Tests of comparing recordings (`megatron-ext parity`): which differences count, and which comes
first."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.recordings import comparison_text
from megatron_ext.recordings.compare import First, ParityVerdict, RunComparison, compare_runs
from megatron_ext.recordings.piece import Piece
from megatron_ext.recordings.run_recording import RunRecording, read_recording
from tests.helpers.recordings import Course, piece, tensor, write

A = Course()
SECOND = "layers.weight", (1,)


def compared(folder: Path, a: Course, b: Course, again: Course | None = None) -> RunComparison:
    courses = {"A": a, "B": b} | ({"again": again} if again else {})
    recordings = {
        name: read_recording(write(folder / name, course)) for name, course in courses.items()
    }
    return compare_runs(recordings["A"], recordings["B"], recordings.get("again"))


def nudged(by: float) -> dict[int, dict[Piece, np.ndarray]]:
    """Return rank 1's tensor with one element changed by ``by``."""
    return {1: tensor("layers.weight", [5, 6, 7, 8 + by], (1,))}


def test_the_same(tmp_path: Path) -> None:
    found = compared(tmp_path, A, A, A)
    assert found.verdict is ParityVerdict.SAME and found.first is None and not found.beyond
    assert comparison_text.verdict_text(found) == [
        "the same to the last bit: losses, parameters and optimizer states, and gradient norms",
        "gradients are not compared directly, only their norm and the optimizer's results",
    ]
    assert [row["B against A"] for row in comparison_text.rows(found)] == ["the same"] * 4
    json.dumps(comparison_text.as_data(found))


def test_a_tensor_that_differs_is_named_with_its_iteration_and_rank(tmp_path: Path) -> None:
    found = compared(tmp_path, A, A.but(changed=nudged(1e-6), changed_from=2), A)
    assert found.verdict is ParityVerdict.DIFFER
    assert found.first == First(2, "layers.weight[1]", (1,), 0, 3)
    assert found.beyond == [SECOND]
    (row,) = comparison_text.tensor_rows(found)
    assert (row["tensor"], row["ranks of B"], row["elements"], row["ulps"]) == (
        "layers.weight[1]",
        "1",
        "1 of 4",
        "1",
    )
    assert "iteration 2, layers.weight[1] on rank 1" in comparison_text.verdict_text(found)[1]


def test_other_weights_at_the_start(tmp_path: Path) -> None:
    """`parity` says so if two runs start from different weights. A V placement and stock have
    different initial weights for the same seed."""
    found = compared(tmp_path, A, A.but(changed=nudged(1.0), changed_from=0), A)
    assert found.first == First(0, "layers.weight[1]", (1,), 0, 3)
    assert any("start from other weights" in line for line in comparison_text.verdict_text(found))


def test_a_loss_that_differs_comes_before_the_tensors_of_its_iteration(tmp_path: Path) -> None:
    b = A.but(losses=(3.0, 2.5001, 2.0), changed=nudged(1e-6), changed_from=2)
    found = compared(tmp_path, A, b, A)
    assert found.first == First(2, "lm loss")


def test_no_more_than_the_floor_is_no_difference(tmp_path: Path) -> None:
    """A difference does not count if it is at most twice the floor, which is the difference between
    two runs of the same command. Some kernels of GPUs give different results in each run."""
    again, b = (A.but(changed=nudged(by), changed_from=1) for by in (1e-5, -1.5e-5))
    found = compared(tmp_path, A, b, again)
    assert found.verdict is ParityVerdict.WITHIN_THE_FLOOR and found.first is None
    assert "within the floor" in comparison_text.verdict_text(found)[0]


def test_more_than_the_floor_is_a_difference(tmp_path: Path) -> None:
    again, b = (A.but(changed=nudged(by), changed_from=1) for by in (1e-5, 1e-3))
    found = compared(tmp_path, A, b, again)
    assert found.verdict is ParityVerdict.DIFFER
    assert found.first == First(3, "layers.weight[1]")


def test_what_another_order_of_sums_gives_is_within_a_second_floor(tmp_path: Path) -> None:
    """A difference does not count if stock with another order of sums differs as much (a second
    floor). If run A gives the same bits whenever it is repeated, the first floor is zero, and every
    bit by which a run with slices of sequences differs used to count as a difference."""

    def recorded(name: str, by: float) -> RunRecording:
        return read_recording(write(tmp_path / name, A.but(changed=nudged(by), changed_from=1)))

    a, b_run, reordered = recorded("A", 0), recorded("B", 2e-5), recorded("reversed", 1e-5)
    found = compare_runs(a, b_run, a, reordered)
    assert found.verdict is ParityVerdict.WITHIN_ANOTHER_ORDER and not found.beyond
    text = comparison_text.verdict_text(found)
    assert text[0].startswith("within what another order of sums gives")
    assert "A against A reordered" in comparison_text.rows(found)[0]
    far = recorded("far", 0.1)
    found = compare_runs(a, far, a, reordered)
    assert found.verdict is ParityVerdict.DIFFER and found.beyond == [SECOND]
    (row,) = comparison_text.tensor_rows(found)
    assert float(row["relative"]) > 100 * float(row["of A reordered"]) > 0
    # Without a run whose sums have another order, the difference is not explained by an order of
    # sums.
    assert compare_runs(a, b_run, a).verdict is ParityVerdict.DIFFER


def test_ulps_around_zero_are_omitted(tmp_path: Path) -> None:
    """Differences of numbers around zero are not printed in ulps. A bias of 1e-9 in one run and of
    -1e-9 in the other run used to be printed as "1736292493 ulps"."""
    a, b = (
        A.but(changed={1: tensor("layers.weight", [5, 6, 7, last], (1,))}, changed_from=1)
        for last in (1e-9, -1e-9)
    )
    found = compared(tmp_path, a, b)
    (row,) = comparison_text.tensor_rows(found)
    assert row["ulps"] == "" and row["norm"] == "10" and row["relative"] == "1.9e-10"
    of_parameters = comparison_text.rows(found)[2]["B against A"]
    assert of_parameters.endswith("by up to 1.9e-10 of a tensor's norm")


def test_losses_have_a_floor_too(tmp_path: Path) -> None:
    again = A.but(losses=(3.0, 2.5001, 2.0))
    assert compared(tmp_path / "1", A, A.but(losses=(3.0001, 2.5, 2.0)), again).first is None
    found = compared(tmp_path / "2", A, A.but(losses=(3.0, 2.5, 2.1)), again)
    assert found.first == First(3, "lm loss")


def test_nan_is_more_than_any_floor(tmp_path: Path) -> None:
    again, b = (A.but(changed=nudged(by), changed_from=1) for by in (1e-3, math.nan))
    found = compared(tmp_path, A, b, again)
    assert found.beyond == [SECOND]
    assert "1 nan in one of them" in comparison_text.tensor_rows(found)[0]["elements"]


def test_a_norm_added_in_another_order_is_said_and_no_difference(tmp_path: Path) -> None:
    one_ulp = float(np.nextafter(np.float32(1.25), np.float32(2)))
    found = compared(tmp_path, A, A.but(norms=(1.5, one_ulp, 1.125)), A)
    assert found.verdict is ParityVerdict.SAME and found.norm_alone
    assert comparison_text.rows(found)[1]["B against A"] == "1 of 3 differ, by up to 1 ulp"
    assert "another order" in comparison_text.verdict_text(found)[1]


def test_a_norm_that_is_not_close_is_a_difference(tmp_path: Path) -> None:
    found = compared(tmp_path, A, A.but(norms=(1.5, 1.26, 1.125)), A)
    assert found.verdict is ParityVerdict.DIFFER and found.first == First(2, "gradient norm")


def test_clipping_by_such_a_norm_is_explained(tmp_path: Path) -> None:
    one_ulp = float(np.nextafter(np.float32(1.25), np.float32(2)))
    a = A.but(arguments={"clip_grad": 1.0})
    b = a.but(norms=(1.5, one_ulp, 1.125), changed=nudged(1e-6), changed_from=2)
    found = compared(tmp_path, a, b, a)
    assert found.verdict is ParityVerdict.DIFFER and found.clipping == 1.0
    assert any("--clip-grad 0" in line for line in comparison_text.verdict_text(found))


@pytest.mark.parametrize("clip_grad", [0, 2.0])
@pytest.mark.parametrize("from_iteration", [2, 3])
def test_a_weight_is_the_first_difference_and_not_a_norm_of_one_ulp(
    clip_grad: float, from_iteration: int, tmp_path: Path
) -> None:
    """The first difference that `parity` names is a wrong weight, not a norm that differs by one
    ulp. A norm is a sum over ranks, so it is one ulp away in any V. The norm used to be named
    first, and --clip-grad as its cause, although nothing was clipped."""
    one_ulp = float(np.nextafter(np.float32(1.25), np.float32(2)))
    a = A.but(arguments={"clip_grad": clip_grad})
    wrong = nudged(1e-3)
    b = a.but(norms=(1.5, one_ulp, 1.125), changed=wrong, changed_from=from_iteration)
    found = compared(tmp_path / "exact", a, b, a)
    assert found.first == First(from_iteration, "layers.weight[1]", (1,), 0, 3)
    assert not found.clipping
    noisy = a.but(changed={0: tensor("layers.weight", [1, 2, 3, 4 + 1e-6], (0,))}, changed_from=1)
    both = {**noisy.changed, **wrong}
    found = compared(tmp_path / "noisy", a, b.but(changed=both, changed_from=1), noisy)
    assert found.first == First(3, "layers.weight[1]")


def test_tensors_are_put_together_however_they_are_divided(tmp_path: Path) -> None:
    """`parity` joins a tensor from tensor-parallel shards that are split further over data-parallel
    ranks."""
    full_tensor = np.arange(24, dtype=np.float32).reshape(4, 6)

    def part(columns: slice, start: int, stop: int) -> dict[Piece, np.ndarray]:
        shard = full_tensor[:, columns]
        part = Piece("w", (), (4, 6), (0, columns.start), shard.shape, start, stop, "float32")
        return {part: np.ascontiguousarray(shard).reshape(-1)[start:stop]}

    left, right = slice(0, 4), slice(4, 6)
    ranks = (part(left, 0, 10), part(right, 0, 8), part(left, 10, 16))
    divided = read_recording(write(tmp_path / "divided", A.but(ranks=ranks)))
    dtype, bits = divided.full_tensor(("w", ()))
    assert dtype == "float32" and np.array_equal(bits.view(np.float32), full_tensor)
    lacking = read_recording(write(tmp_path / "lacking", A.but(ranks=ranks[:2])))
    with pytest.raises(ValueError, match="w has 24 elements, and only 18 were recorded"):
        lacking.full_tensor(("w", ()))


def test_copies_that_are_not_the_same(tmp_path: Path) -> None:
    """`parity` names a tensor whose copies differ within a run: copies of a tensor on data-parallel
    ranks, or the two copies of a tied embedding."""

    def with_copy(values: list[float]) -> Course:
        copy = {
            Piece(*{**vars(p), "is_copy": True}.values()): v
            for p, v in tensor("tied", values).items()
        }
        first = A.ranks[0] | tensor("tied", [1, 2])
        return A.but(ranks=(first, A.ranks[1] | copy))

    found = compared(tmp_path, with_copy([1, 2]), with_copy([1, 9]))
    assert found.verdict is ParityVerdict.DIFFER and found.copies == [("tied", ())]
    assert any("copies that differ" in line for line in comparison_text.verdict_text(found))


def test_a_tensor_that_only_one_has(tmp_path: Path) -> None:
    found = compared(tmp_path, A, A.but(ranks=(A.ranks[0] | tensor("more", [1]), A.ranks[1])))
    assert found.verdict is ParityVerdict.DIFFER and found.missing == [("more", ())]


def test_another_type(tmp_path: Path) -> None:
    half = np.array([5, 6, 7, 8], np.float16)
    b = A.but(ranks=(A.ranks[0], {piece("layers.weight", half, (1,)): half}))
    found = compared(tmp_path, A, b, A)
    assert found.verdict is ParityVerdict.DIFFER
    assert comparison_text.tensor_rows(found)[0]["elements"] == "float32 and float16"


@pytest.mark.parametrize(
    ("course", "says"),
    [
        (A.but(losses=(3.0, 3.0, 3.0)), "lm loss is 3 in all 3 iterations: it does not move"),
        (A.but(losses=(math.nan,) * 3), "lm loss is nan in all 3 iterations"),
        (A.but(norms=(0.0, 0.0, 0.0)), "the gradients' norm is 0 in all 3 iterations"),
        (A.but(losses=(3.0,), norms=(1.0,), changed_from=1), "take at least 2"),
    ],
)
def test_a_run_that_does_not_move_is_no_pass(tmp_path: Path, course: Course, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compared(tmp_path, course, course, course)


def test_other_models_and_data_cannot_be_compared(tmp_path: Path) -> None:
    b = A.but(arguments={"num_layers": 4, "clip_grad": 0, "seed": 2})
    with pytest.raises(ValueError, match=r"model and training: --num-layers \(2 and 4\), --seed"):
        compared(tmp_path, A, b)


def test_stages_of_a_hybrid_model_may_end_elsewhere(tmp_path: Path) -> None:
    """Two runs of a hybrid model can be compared although their stages end at other layers: on a V
    its pattern has twice as many segments."""
    a, b, other = (
        A.but(arguments={"hybrid_layer_pattern": p}) for p in ("*-|*-", "*|-|*|-", "*-*E")
    )
    found = compared(tmp_path / "b", a, b)
    assert found.verdict is ParityVerdict.SAME
    assert found.settings["--hybrid-layer-pattern"] == ("*-|*-", "*|-|*|-")
    with pytest.raises(ValueError, match="differ in their model: --hybrid-layer-pattern"):
        compared(tmp_path / "other", a, other)


def test_other_iterations_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="3 iterations from 0 on, and 2 iterations from 0 on"):
        compared(tmp_path, A, A.but(losses=(3.0, 2.5), norms=(1.5, 1.25)))


def test_what_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no recording"):
        read_recording(tmp_path)


@pytest.mark.parametrize("version", [0, 2, None])
def test_a_recording_of_another_version_is_named(version: object, tmp_path: Path) -> None:
    lines = write(tmp_path, A) / "rank-00000.jsonl"
    about, rest = lines.read_text().split("\n", 1)
    lines.write_text(f"{json.dumps(json.loads(about) | {'format': version})}\n{rest}")
    with pytest.raises(ValueError, match=r"another version of megatron_ext: .* record it anew"):
        read_recording(tmp_path)


def test_a_recording_that_was_cut_off(tmp_path: Path) -> None:
    lines = write(tmp_path, A) / "rank-00001.jsonl"
    text = lines.read_text()
    lines.write_text(text[: text.index('{"iteration": 2') + 20])
    with pytest.raises(ValueError, match="rank 1 recorded 1 iteration of 3"):
        read_recording(tmp_path)
    lines.unlink()
    with pytest.raises(ValueError, match=r"lacks the file rank-00001\.jsonl"):
        read_recording(tmp_path)


def test_tensors_that_were_cut_off(tmp_path: Path) -> None:
    file = write(tmp_path, A) / "rank-00000.bin"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"rank-00000\.bin has 20 of 24 bytes"):
        read_recording(tmp_path)


def test_nothing_is_recorded_over_another_recording(tmp_path: Path) -> None:
    write(tmp_path, A)
    with pytest.raises(ValueError, match="holds a recording already: name a new folder"):
        write(tmp_path, A)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "megatron_ext.recordings.writing.bytes_file", lambda folder, rank: Path("/dev/full")
    )
    with pytest.raises(ValueError, match="cannot take the recording: No space left on device"):
        write(tmp_path, A)
