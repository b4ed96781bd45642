"""Tests of activation offload to the host at run time: small stages on ranks connected by gloo.

Each case compares with the same stages run in one process, to the last bit, and counts the
offloaded bytes.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import re
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from megatron_ext.compile.program.memory import most_on_host  # noqa: E402
from megatron_ext.compile.program.verify import Program  # noqa: E402
from megatron_ext.compile.registry import choose  # noqa: E402
from megatron_ext.features.offload.runtime import buffers as host_buffers  # noqa: E402
from megatron_ext.features.offload.runtime import offload  # noqa: E402
from megatron_ext.features.offload.runtime.offload import ActivationOffload, OffloadedStep  # noqa: E402
from megatron_ext.runtime.host import copies as host_copies  # noqa: E402
from megatron_ext.runtime.host.copies import CopiedBytes, DirectCopies, Transfer  # noqa: E402
from megatron_ext.runtime.weight_gradients import queue  # noqa: E402
from megatron_ext.schedule.action import Action, Kind, parse_action  # noqa: E402
from megatron_ext.schedule.kinds import RULES, Held, Lane  # noqa: E402
from megatron_ext.schedule.problem import Offload  # noqa: E402
from tests.helpers.adversary import LateCopies  # noqa: E402
from tests.helpers.combinations import each_once  # noqa: E402
from tests.helpers.ranks import run_ranks, values  # noqa: E402
from tests.helpers.stages import (  # noqa: E402
    CPU,
    WIDTH,
    LinearStage,
    Pipeline,
    alone,
    program_for,
    world,
)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL", 0)


def check_numbers(pipeline: Pipeline, steps: int) -> None:
    reference = alone(pipeline, steps)
    for number, stage in pipeline.stages.items():
        assert len(stage.gradients) == 2
        for got, expected in zip(stage.gradients, reference[number].gradients, strict=True):
            assert torch.equal(got, expected), f"gradients of stage {number}"
        assert stage.losses == reference[number].losses


def leaving(program: Program, rank: int) -> Counter[tuple[int, Held]]:
    """Return the number of microbatches that ``rank`` offloads, by stage and kind of saved
    tensors."""
    row = program.schedule.rows[rank]
    return Counter(
        (action.stage, held)
        for action in row
        if RULES[action.kind].lane is Lane.TO_HOST
        for held in RULES[action.kind].moves
    )


# --- whole steps with offload


# By day test_adversary.py runs every family with full and with half offload, so these cases run at
# night.
@pytest.mark.parametrize(
    ("spec", "ranks", "way"),
    [
        (*spec_and_ranks, way)
        for spec_and_ranks, way in each_once(
            [
                ("1f1b", 3),
                ("gpipe", 2),
                ("zb-h1", 5),
                ("interleaved", 2),
                ("interleaved:vpp=4", 3),
                ("gis", 3),
                ("gis-h", 4),
                ("zb-v", 3),
                ("v-half", 3),
                ("v-auto", 4),
            ],
            [Offload.FULL, Offload.HALF],
        )
    ],
)
def test_gradients_are_those_without(spec: str, ranks: int, way: Offload) -> None:
    """Gradients with activation offload equal those without it. The first step shows the sizes of
    host buffers; after it, as many buffers are pinned as the program predicts, and no more after
    later steps."""
    program = program_for(choose(spec), ranks, 4 * ranks, offload=way)

    def run(rank: int) -> int:
        pipeline = Pipeline(program, world())
        wanted = sum(most_on_host(program.schedule.rows[rank]).values())
        buffers = pipeline.offload.buffers
        for registered in (0, wanted):
            pipeline.step()
            assert (buffers.plain, buffers.registered) == (wanted, registered)
            left = pipeline.offload.bytes_left
            assert left.keys() == leaving(program, rank).keys()
            assert all(left.values())
        check_numbers(pipeline, steps=2)
        pipeline = Pipeline(program, world(), varies=True)
        pipeline.step()
        check_numbers(pipeline, steps=1)
        return wanted

    assert sum(values(run_ranks(ranks, run))) > 0


@pytest.mark.parametrize("spec", ["1f1b", "gis", "zb-v", "zb-h1"])
def test_copies_that_end_as_late_as_they_may(spec: str) -> None:
    """A pass waits for the copies of its offloaded tensors. The copies here end only when a pass
    waits for them, so a pass that does not wait would compute with the former contents of the
    memory."""
    program = program_for(choose(spec), 3, 12, offload=Offload.FULL)

    def run(rank: int) -> None:
        pipeline = Pipeline(program, world(), copies=LateCopies())
        for _ in range(2):
            pipeline.step()
        check_numbers(pipeline, steps=2)

    values(run_ranks(3, run))


def test_a_buffer_is_not_overwritten_before_it_has_been_read() -> None:
    """A host buffer is not overwritten before its contents have been copied back. The next
    microbatch's copy into the same buffer starts before any pass has waited for the copy back."""
    first, second = ([action.replace("F0", f"F{m}") for action in BACK] for m in range(2))
    leaving = Leaving(*first, *second)
    leaving.step._offload.copies = LateCopies()
    xs = [torch.full((8,), m + 1.0).requires_grad_() for m in range(2)]
    ys = [leaving.forward(square, x, m) for m, x in enumerate(xs)]
    leaving.perform(*first, *second)
    assert leaving.offload.buffers.plain == 1
    for microbatch, (x, y) in enumerate(zip(xs, ys, strict=True)):
        leaving.step.before_backward(Action(0, Kind.FULL_BACKWARD, microbatch))
        y.backward()
        assert torch.equal(x.grad, torch.full((8,), 2 * (microbatch + 1.0)))


# --- which tensors are offloaded, and which stay on the device


def perform(step: OffloadedStep, action: Action) -> None:
    step.handlers()[action.kind](action)


class Leaving:
    """Forward and backward pass of one stage with its offload copies, in this process."""

    def __init__(self, *kinds: str) -> None:
        self.offload = ActivationOffload(0, CPU)
        self.actions = list(map(parse_action, kinds))
        self.step: OffloadedStep = self.offload.step(tuple(self.actions))

    def forward(
        self, function: Callable[..., Tensor], x: Tensor | None, microbatch: int = 0
    ) -> Tensor:
        with self.step.around_forward(0, microbatch, x):
            return function() if x is None else function(x)

    def perform(self, *actions: str) -> None:
        for action in actions:
            perform(self.step, parse_action(action))

    @property
    def bytes_left(self) -> int:
        return self.offload.bytes_left.total()


AWAY = ("0OFFLOAD_F0", "0FREE_F0")
BACK = (*AWAY, "0RELOAD_F0")


def square(x: Tensor) -> Tensor:
    return (x * x).sum()


def test_memory_is_given_back_and_comes_back() -> None:
    leaving = Leaving(*BACK)
    x = torch.arange(8.0).requires_grad_()
    y = leaving.forward(square, x)
    leaving.perform(*AWAY)
    assert x.untyped_storage().nbytes() == 0
    leaving.perform("0RELOAD_F0")
    leaving.step.before_backward(parse_action("0B0"))
    y.backward()
    leaving.step.finish()
    assert torch.equal(x.grad, 2 * torch.arange(8.0))


def test_storages_are_known_no_longer_than_needed() -> None:
    """Offload keeps no reference to saved storages after they have come back, nor to those that
    stay on the device, so their memory is freed as soon as autograd drops them."""
    leaving = Leaving(*BACK)
    y = leaving.forward(lambda x: x.exp().square().sum(), torch.arange(8.0).requires_grad_())
    leaving.perform(*BACK)
    leaving.step.before_backward(parse_action("0B0"))
    known = [o for o in gc.get_objects() if type(o) in (offload._Storages, offload._Away)]
    assert not any(getattr(o, "_noted", True) for o in known)
    y.backward()


def test_a_tensor_saved_often_and_in_parts_travels_once() -> None:
    leaving = Leaving(*BACK)
    x = torch.arange(8.0).requires_grad_()
    y = leaving.forward(lambda x: square(x) + square(x.view(2, 4)) + square(x[3:5]), x)
    leaving.perform(*AWAY)
    assert leaving.bytes_left == 32
    leaving.perform("0RELOAD_F0")
    leaving.step.before_backward(parse_action("0B0"))
    y.backward()
    ones = torch.zeros(8)
    ones[3:5] = 1
    assert torch.equal(x.grad, (4 + 2 * ones) * torch.arange(8.0))


def test_what_other_code_refers_to_stays() -> None:
    """Tensors that other code refers to stay on the device under offload: a parameter, a cache, an
    output that is being sent, a view that a layer keeps."""
    leaving = Leaving(*AWAY)
    weight, cache = torch.nn.Parameter(torch.ones(8)), torch.full((8,), 3.0)
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        z = x * weight
        kept.append((z * cache)[2:])  # a view of the tensor that exp saves
        return (kept[0]._base if kept[0]._base is not None else kept[0]).exp()

    y = leaving.forward(function, torch.arange(8.0).requires_grad_())
    leaving.perform(*AWAY)
    for stays in (weight, cache, y, kept[0]):
        assert stays.untyped_storage().nbytes() == 32
    assert leaving.bytes_left == 32  # the bytes of x


def test_what_two_microbatches_share_stays_until_one_is_done() -> None:
    leaving = Leaving(*AWAY, "0OFFLOAD_F1", "0FREE_F1")
    mask = [torch.arange(8.0)]
    xs = [torch.ones(8).requires_grad_() for _ in range(2)]
    ys = [leaving.forward(lambda x: (x * mask[0]).sum(), xs[m], m) for m in range(2)]
    shared = weakref.ref(mask.pop())
    leaving.perform(*AWAY)
    assert leaving.bytes_left == 32  # the bytes of x of microbatch 0
    del ys[0]
    gc.collect()
    assert shared() is None
    leaving.perform("0OFFLOAD_F1")
    # The bytes include x of microbatch 1, and the mask, which no other microbatch uses any more.
    assert leaving.bytes_left == 96


def test_an_empty_storage_and_a_foreign_one_stay() -> None:
    """Empty storages and storages that torch cannot resize are not offloaded. Megatron's recompute
    of single modules empties the storages that it saves; a data loader's memory may not be
    resizable."""
    import numpy as np

    leaving = Leaving(*AWAY)

    def function(x: Tensor) -> Tensor:
        z = x + 1
        y = square(z) + square(x * torch.from_numpy(np.ones(8, np.float32)))
        z.untyped_storage().resize_(0)
        return y

    y = leaving.forward(function, torch.arange(8.0).requires_grad_())
    leaving.perform(*AWAY)
    assert leaving.bytes_left == 64  # the bytes of x, and of x * 1
    del y


def test_what_no_pass_needs_any_more_is_not_offloaded() -> None:
    """Saved tensors that no pass needs any more are not offloaded. Megatron's auxiliary loss drops
    the values of topk, whose autograd node has saved the indices. These indices used to be copied
    back from the host, into memory that the next F could have used."""
    leaving = Leaving(*BACK)
    x = torch.arange(8.0).requires_grad_()
    y = leaving.forward(lambda x: square(x * int(x.topk(4).indices.sum())), x)
    leaving.perform(*AWAY)
    assert leaving.bytes_left == 64  # the bytes of x, and of the tensor that is squared
    leaving.perform("0RELOAD_F0")
    leaving.step.before_backward(parse_action("0B0"))
    y.backward()
    assert torch.equal(x.grad, 2 * 22**2 * torch.arange(8.0))


def test_memory_that_a_copy_writes_to_is_kept_until_the_copy_has_ended() -> None:
    """Memory that a copy from the host writes to lives until the copy has ended, even if no pass
    needs the copy any more. The last reference to that memory used to be dropped when the copy had
    started, so the copy wrote to freed memory."""
    leaving = Leaving(*BACK)
    y = leaving.forward(square, torch.arange(8.0).requires_grad_() + 1)
    leaving.perform(*AWAY)
    (away,) = leaving.step._away.values()
    (storage,) = [StorageWeakRef(left.storage) for left in away.storages]
    del away, y
    gc.collect()
    leaving.perform("0RELOAD_F0")
    gc.collect()
    assert not storage.expired()
    leaving.step.before_backward(parse_action("0B0"))
    assert storage.expired()


class TwoStreams(DirectCopies):
    """Stand-in for copies of a device with two streams; the test sets the current stream."""

    def __init__(self) -> None:
        self.current: Any = "main"

    def current_stream(self) -> Any:
        return self.current


def test_the_allocator_knows_the_streams_that_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator knows all streams that read an offloaded tensor (`record_stream`). Megatron's
    shared experts run on a stream of their own and read memory that RELOAD had allocated on the
    main stream: that memory used to return to the main stream's pool too early. Memory that a copy
    to the host reads may belong to either stream; it used to be freed when the main stream had
    waited for the copy, although the other stream had not."""
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: told.append((tensor.nbytes, stream))
    )
    leaving = Leaving(*BACK)
    leaving.step._offload.copies = copies = TwoStreams()

    def function(x: Tensor) -> Tensor:
        """Read x (32 bytes) on both streams, 64 bytes on the side stream, and 128 bytes on the main
        stream."""
        copies.current = "side"
        y = square(x) + square(torch.cat([x, x]))
        copies.current = "main"
        return y + square(x) + square(torch.cat([x, x, x, x]))

    y = leaving.forward(function, torch.arange(8.0).requires_grad_())
    leaving.perform("0OFFLOAD_F0")
    assert told == []
    leaving.perform("0FREE_F0")
    assert sorted(told) == [(32, "main"), (64, "main"), (128, "main")]
    told.clear()
    leaving.perform("0RELOAD_F0")
    assert sorted(told) == [(32, "side"), (64, "side")]
    leaving.step.before_backward(parse_action("0B0"))
    y.backward()


def test_small_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALL", 33)
    leaving = Leaving(*BACK)
    x = torch.arange(8.0).requires_grad_()
    y = leaving.forward(square, x)
    leaving.perform(*BACK)
    leaving.step.before_backward(parse_action("0B0"))
    y.backward()
    assert leaving.bytes_left == leaving.offload.buffers.plain == 0


def test_what_waits_for_w_leaves() -> None:
    stage = LinearStage(0, 1)
    leaving = Leaving("0OFFLOAD_I0", "0FREE_I0", "0RELOAD_I0")
    stage.forward(0, None)
    stage.backward_input(0, None)
    _, x = queue.tensors(0, 0)
    leaving.perform("0OFFLOAD_I0", "0FREE_I0")
    assert x.untyped_storage().nbytes() == 0
    assert leaving.bytes_left == 2 * 3 * WIDTH * 4  # the bytes of x and dy
    leaving.perform("0RELOAD_I0")
    leaving.step.before_backward(parse_action("0W0"))
    del x
    stage.backward_weight(0)
    reference = LinearStage(0, 1)
    reference.forward(0, None)
    reference.backward(0, None)
    assert torch.equal(stage.weight.grad, reference.weight.grad)


# --- buffers on the host


class CountedCopies(DirectCopies):
    """Stand-in for copies that fails if host memory is pinned during a step, which can take a
    driver long."""

    def __init__(self) -> None:
        self.is_in_step = False
        self.sizes: list[int] = []  # sizes of pinned buffers, in bytes

    def host_buffer(self, size: int) -> Tensor:
        assert not self.is_in_step, "memory is registered with messages under way"
        self.sizes.append(size)
        return super().host_buffer(size)

    def release(self, buffer: Tensor) -> None:
        assert not self.is_in_step, "memory is given back with messages under way"
        self.sizes.remove(buffer.numel())


class Steps:
    """Steps of one stage in which each microbatch's tensors are offloaded and reloaded before the
    next."""

    def __init__(self, expected: int = 0) -> None:
        self.copies = CountedCopies()
        self.offload = ActivationOffload(0, CPU, self.copies)
        self.buffers = self.offload.buffers
        if expected:
            self.buffers.expected = {(0, Held.ACTIVATION): expected}

    def step(self, *numbers: int) -> None:
        """Run a step with a microbatch for each of ``numbers``. The microbatch saves that many
        numbers of 4 bytes."""
        rows = [[action.replace("F0", f"F{m}") for action in BACK] for m in range(len(numbers))]
        step = self.offload.step(tuple(parse_action(action) for row in rows for action in row))
        self.copies.is_in_step = True
        for microbatch, (row, size) in enumerate(zip(rows, numbers, strict=True)):
            x = torch.arange(float(size)).requires_grad_()
            with step.around_forward(0, microbatch, x):
                y = square(x)
            for action in row:
                perform(step, parse_action(action))
            step.before_backward(Action(0, Kind.FULL_BACKWARD, microbatch))
            y.backward()
            assert torch.equal(x.grad, 2 * torch.arange(float(size)))
        step.finish()
        self.copies.is_in_step = False


def test_memory_is_registered_between_steps() -> None:
    """Host buffers are pinned between steps. They used to be pinned when the first microbatch was
    offloaded, while receives were posted. Pinning may make the driver wait for these receives."""
    steps = Steps()
    for _ in range(3):
        steps.step(1024, 1024)
    assert steps.copies.sizes == [4096]
    assert (steps.buffers.plain, steps.buffers.registered) == (1, 1)


def test_costs_with_bytes_are_taken_at_their_word() -> None:
    """If costs give bytes, host buffers have these sizes in the first step, and afterwards the
    sizes that microbatches really need."""
    steps = Steps(expected=5000)
    steps.step(1024)
    assert steps.copies.sizes == [5000] and not steps.buffers.plain
    steps.step(1024)
    assert steps.copies.sizes == [4096] and not steps.buffers.plain
    steps = Steps(expected=3000)
    steps.step(1024)
    assert steps.copies.sizes == [3000] and steps.buffers.plain == 1
    steps.step(1024)
    assert steps.copies.sizes == [4096] and steps.buffers.plain == 1


def test_a_microbatch_that_needs_more_grows_the_buffers_after_its_step(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Host buffers grow after a step in which a microbatch needed more. Until then that microbatch
    is copied to memory that is not pinned. The growth is logged once."""
    steps = Steps()
    steps.step(1024, 1024)
    steps.step(1024, 2048, 2048, 1024)
    assert steps.copies.sizes == [4096] and steps.buffers.plain == 2
    steps.step(2048, 2200)
    assert steps.copies.sizes == [9216] and steps.buffers.plain == 2
    steps.step(10240)
    steps.step(10240)
    assert steps.copies.sizes == [46080] and steps.buffers.plain == 3
    assert capfd.readouterr().out.count("larger host buffer") == 1


def test_buffers_share_no_page_and_are_not_shared_with_forked_processes() -> None:
    """Host buffers start at pages of their own, and forked processes do not share these pages.
    Small buffers used to lie on one page, which a data loader's forked worker shared."""
    copies = DirectCopies()
    buffers = [copies.host_buffer(size) for size in (1, 5000, 100)]
    pages = [
        range(buffer.data_ptr() // mmap.PAGESIZE, -(-_end(buffer) // mmap.PAGESIZE))
        for buffer in buffers
    ]
    assert [len(used) for used in pages] == [1, 2, 1]
    assert len(set(itertools.chain(*pages))) == 4
    for buffer in buffers:
        assert buffer.data_ptr() % mmap.PAGESIZE == 0
        # The flag "dc" of a memory area says that the kernel does not copy its pages on fork.
        assert "dc" in _flags_of_memory_at(buffer.data_ptr())


def _end(buffer: Tensor) -> int:
    return buffer.data_ptr() + buffer.numel()


def _flags_of_memory_at(address: int) -> list[str]:
    """Return the kernel's flags of this process's memory at ``address``."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if re.fullmatch("[0-9a-f]+-[0-9a-f]+", first):
            start, end = (int(text, 16) for text in first.split("-"))
            is_there = start <= address < end
        elif is_there and first == "VmFlags:":
            return rest
    raise AssertionError(f"no memory at {address:x}")


# --- copies and host memory that fail


class FailingCopies(DirectCopies):
    def __init__(self, fails: Action) -> None:
        self.fails = fails

    def start(
        self, action: Action, pieces: Sequence[CopiedBytes], after: Transfer | None
    ) -> Transfer:
        if action == self.fails:
            raise RuntimeError("the link is down")
        return super().start(action, pieces, after)


@pytest.mark.parametrize("kind", [Kind.OFFLOAD_F, Kind.RELOAD_F, Kind.OFFLOAD_I, Kind.RELOAD_I])
def test_a_copy_that_fails_ends_all_ranks(kind: Kind) -> None:
    program = program_for(choose("zb-h1"), 3, 12, offload=Offload.FULL)
    row = next(r for r in program.schedule.rows if any(a.kind is kind for a in r))
    failing = program.schedule.rows.index(row)
    action = [a for a in row if a.kind is kind][1]

    def run(rank: int) -> None:
        pipeline = Pipeline(program, world(), copies=FailingCopies(action))
        try:
            pipeline.step()
        finally:
            step_of(pipeline).finish()  # no tensor is left half offloaded

    results = run_ranks(3, run)
    for rank, result in enumerate(results):
        assert result.exit_code == 1
        expected = f"pipeline rank {rank}, in {action}" if rank == failing else "PeerFailure"
        assert expected in result.error
        assert "AssertionError" not in result.error
    assert "the link is down" in results[failing].error


def step_of(pipeline: Pipeline) -> OffloadedStep:
    """Return the last step of ``pipeline``."""
    (step,) = (o for o in gc.get_objects() if type(o) is OffloadedStep)
    assert step._offload is pipeline.offload
    return step


class FailingLater(DirectCopies):
    """Stand-in for a copy that fails only when it is waited for."""

    def start(
        self, action: Action, pieces: Sequence[CopiedBytes], after: Transfer | None
    ) -> Transfer:
        return self

    def wait(self) -> None:
        raise RuntimeError("the link is down")

    finish = wait


def test_a_copy_that_fails_later_is_named() -> None:
    leaving = Leaving(*BACK)
    leaving.step._offload.copies = FailingLater()
    leaving.forward(square, torch.arange(8.0).requires_grad_())
    leaving.perform("0OFFLOAD_F0")
    with pytest.raises(RuntimeError, match="the link is down") as caught:
        leaving.perform("0FREE_F0")
    assert caught.value.__notes__ == ["megatron_ext: the copy 0OFFLOAD_F0 has failed"]
    leaving.step.abandon()
    leaving.step.finish()


def test_host_memory_that_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little host memory ends the training in the first step, when a microbatch shows its real
    size."""
    program = program_for(choose("1f1b"), 2, 4, offload=Offload.FULL)
    monkeypatch.setattr(host_buffers, "available_bytes", lambda: 10)

    def run(rank: int) -> None:
        Pipeline(program, world()).step()

    errors = [result.error for result in run_ranks(2, run)]
    short = [error for error in errors if "ValueError" in error]
    assert short and all(errors)
    assert "but only 10 B are available: offload less" in short[0]
    assert "OFFLOAD_F" in short[0]


class NoPinning:
    """Stand-in for a CUDA runtime on a machine that allows no locked memory."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return 2

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"


def test_memory_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """If host memory cannot be pinned, a training ends between two steps, and before the first step
    if the costs give bytes."""
    monkeypatch.setattr(torch.cuda, "cudart", NoPinning)
    monkeypatch.setattr(DirectCopies, "host_buffer", lambda self, size: host_copies.pinned(size))
    offload = ActivationOffload(0, CPU)
    offload.buffers.expected = {(0, Held.ACTIVATION): 2**30}
    with pytest.raises(
        ValueError, match=r"1 GiB .* \(cudaHostRegister: out of memory\).*ulimit -l"
    ):
        offload.step(tuple(map(parse_action, BACK)))
