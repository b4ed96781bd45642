"""Tests of trainings in which something goes wrong, in Megatron's own loop and in a caller's.

A loss is NaN, a forward pass raises, data end early, a batch grows, or an evaluation has another
size. Either the ranks do what stock Megatron does, or every rank ends with a clear error.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules as stock_schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_ext
from megatron_ext.adapter import programs
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.schedule.problem import Problem
from tests.helpers import callers
from tests.helpers.combinations import IS_NIGHT, at_night, each_once, nightly
from tests.helpers.megatron_runs import (
    SCRIPT,
    Run,
    assert_same,
    evaluations,
    fork_checkpoint_manager,
    losses,
    model_flags,
    train,
    whole_state,
)
from tests.helpers.ranks import (
    RankResult,
    Script,
    agent_store,
    run_ranks,
    running_ranks,
    torchrun_environment,
    values,
)
from tests.pipeline.callers.test_callers import (
    BATCH,
    SEQUENCE,
    V_LAYOUT,
    V_RANKS,
    VOCABULARY,
    build_chunks,
    build_model,
)

SCHEDULES = ("zb-h1", "zb-v", "interleaved")
BROKEN = "the model is broken"


# --- launching a training with a seeded fault


class Mishap(Protocol):
    """Fault that a test seeds in one rank of a training."""

    def install(self, rank: int) -> None:
        """Seed the fault in the process of ``rank``, before it trains."""
        ...


@dataclass(frozen=True)
class Fault:
    """Fault of one model chunk: its forward pass number ``first``, counted from 0, raises or
    returns NaN, and with ``again`` all later passes too."""

    rank: int
    chunk: int
    first: int
    throws: bool = False  # if false, the output of the pass is NaN
    again: bool = False

    def install(self, rank: int) -> None:
        """Seed the fault in the process of ``rank``, or in the process from which that rank will be
        forked."""
        calls = 0

        def change(module: torch.nn.Module, args: Any, output: Any) -> Any:
            nonlocal calls
            if not isinstance(module, GPTModel) or dist.get_rank() != self.rank:
                return None
            if (module.vp_stage or 0) != self.chunk:
                return None
            calls += 1
            if calls != self.first + 1 and not (self.again and calls > self.first):
                return None
            if self.throws:
                raise ValueError(BROKEN)
            return output * float("nan")

        torch.nn.modules.module.register_module_forward_hook(change)


@dataclass(frozen=True)
class FullDisk:
    """Fault of a rank that cannot write files of 100 kB: as on a full disk, writing raises OSError.

    A rank's part of a checkpoint is larger than that, its log is smaller.
    """

    rank: int

    def install(self, rank: int) -> None:
        if rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            # at the limit of file sizes Python would cut off a .pyc file without an error
            sys.dont_write_bytecode = True


@dataclass(frozen=True)
class Training:
    """Launch of the training script on each rank."""

    ranks: int
    port: int
    flags: Sequence[str]
    fault: Mishap

    def __call__(self, rank: int) -> None:
        torch.compiler.set_stance("force_eager")
        os.environ |= torchrun_environment(rank, self.ranks, self.port)
        os.dup2(2, 1)  # Megatron's loggers write to standard output
        from megatron_ext.__main__ import main

        if "--save" in self.flags:
            fork_checkpoint_manager()
        self.fault.install(rank)
        main([str(SCRIPT), *self.flags])


def end_of(script: Script, ranks: int, flags: Sequence[str], fault: Mishap) -> list[RankResult]:
    """Train with ``fault`` and return the results of the ranks. Fails if a rank hangs, and had to
    be killed."""
    with agent_store() as port:
        training = Training(ranks, port, tuple(flags), fault)
        with running_ranks(ranks, training, script, connect=False) as running:
            results = running.wait()
    for rank, result in enumerate(results):
        assert result.exit_code is not None, f"rank {rank} hangs: {result.stderr}"
    return results


def pipeline_flags(ranks: int, microbatches: int, **flags: object) -> list[str]:
    return model_flags(
        pipeline_model_parallel_size=ranks,
        num_layers=2 * ranks,
        global_batch_size=microbatches,
        train_iters=3,
        **flags,
    )


# --- a loss that is not a number


def said_of_the_loss(result: RankResult) -> list[str]:
    """Return Megatron's words about a result that it rejects, without the numbers in them."""
    return re.findall(
        r"Unexpected result nan on rank \d at iteration #\d invocation #\d|"
        r"unexpected result is (?:not )?reproducible",
        result.stderr,
    )


@nightly("by day such losses are trained on, below; Megatron's own machine ends these")
@pytest.mark.parametrize(
    "again",
    [
        pytest.param(True, id="whenever it is run again"),
        pytest.param(False, id="once"),
    ],
)
def test_a_loss_that_is_not_a_number(script: Script, tmp_path: Path, again: bool) -> None:
    """A NaN loss ends the training with stock's exit codes. Megatron repeats such an iteration to
    learn whether the hardware is to blame, and ends all ranks: with code 17 if the second result
    differs, and with code 16 and a checkpoint if the second result is the same."""
    # The pass is that of the third microbatch of the second iteration, because Megatron never
    # checks the first iteration.
    at = 4 + 2
    line, chunks = Fault(1, 0, at, again=again), Fault(1, 1, at, again=again)
    expected = end_of(
        script, 2, pipeline_flags(2, 4, save_interval=1000, save=tmp_path / "stock"), line
    )
    assert [result.exit_code for result in expected] == [16 if again else 17] * 2
    assert said_of_the_loss(expected[1]) == [
        "Unexpected result nan on rank 1 at iteration #3 invocation #3",
        f"unexpected result is {'' if again else 'not '}reproducible",
    ]
    for schedule in SCHEDULES if IS_NIGHT else ("zb-v" if again else "zb-h1",):
        kept: dict[str, object] = {"save": tmp_path / schedule, "save_interval": 1000}
        flags = pipeline_flags(2, 4, pipeline_schedule=schedule, **kept)
        results = end_of(script, 2, flags, line if schedule == "zb-h1" else chunks)
        for result, stocks in zip(results, expected, strict=True):
            assert result.exit_code == stocks.exit_code, schedule
            assert said_of_the_loss(result) == said_of_the_loss(stocks), schedule


@contextlib.contextmanager
def fault_in_ranks(fault: Fault) -> Iterator[None]:
    """Seed ``fault`` in all ranks that are forked within the context."""
    hooks = torch.nn.modules.module._global_forward_hooks
    before = dict(hooks)
    fault.install(fault.rank)
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(before)


@pytest.mark.parametrize(
    "precision", [{}, *at_night({"fp16": True, "initial_loss_scale": 1024})], ids=str
)
def test_a_loss_that_is_not_a_number_without_the_check(precision: dict[str, object]) -> None:
    """Without Megatron's check of the loss, a NaN loss has NaN gradients. As in stock, the
    optimizer applies these gradients, or in fp16 skips the iteration."""
    flags: dict[str, object] = {"no_check_for_nan_in_loss_and_grad": True, **precision}
    with fault_in_ranks(Fault(1, 0, 4 + 2)):
        expected = train(2, pipeline_flags(2, 4, **flags))
        runs = train(2, pipeline_flags(2, 4, pipeline_schedule="zb-h1", **flags))
    assert list(map(repr, losses(runs))) == list(map(repr, losses(expected)))
    assert whole_state(runs) == whole_state(expected)
    with fault_in_ranks(Fault(1, 1, 4 + 2)):
        for schedule in ("zb-v", *at_night("interleaved")):
            runs = train(2, pipeline_flags(2, 4, pipeline_schedule=schedule, **flags))
            are_numbers = [loss == loss for loss in losses(runs)]
            assert are_numbers == [loss == loss for loss in losses(expected)]


# --- a checkpoint that does not fit on the disk


IN_THE_BACKGROUND: dict[str, object] = {
    "async_save": True,
    "use_persistent_ckpt_worker": True,
    "async_strategy": "mcore",
}


# If checkpoints are saved in the background, each rank has a second process that imports Megatron;
# with and without that process a full disk ends in the same error of Megatron's.
FULL = {"at once": (4, {}), "in the background": (2, IN_THE_BACKGROUND)}


@nightly("test_faults_between_steps.py fills the disk in a save, and test_checkpoints.py resumes")
@pytest.mark.parametrize(("ranks", "how"), FULL.values(), ids=FULL)
def test_a_full_disk(script: Script, tmp_path: Path, ranks: int, how: dict[str, object]) -> None:
    """A full disk ends all ranks of a training that saves a checkpoint. The rank with the full disk
    says what failed (torch's zip writer sometimes hides the OSError behind a wrong position), and
    global rank 0 names that rank. The checkpoint before is the valid one."""
    common: dict[str, object] = {
        "hidden_size": 64,
        "use_distributed_optimizer": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "pipeline_schedule": "zb-v",
    }
    whole = train(ranks, pipeline_flags(2, 4, **common, **how, save=tmp_path, save_interval=1))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    shutil.rmtree(tmp_path / "iter_0000002")
    again = pipeline_flags(2, 4, **common, **how, load=tmp_path, save=tmp_path, save_interval=1)
    results = end_of(script, ranks, again, FullDisk(1))
    assert {result.exit_code for result in results} == {1}, results
    assert all("CheckpointException" in result.stderr for result in results), results
    assert "Local worker 0 encountered an error: " in results[1].stderr, results[1].stderr
    assert "dict_keys([1])" in results[0].stderr, results[0].stderr
    runs = train(ranks, pipeline_flags(2, 4, **common, load=tmp_path))
    assert len(losses(runs)) == 2
    assert_same(runs, whole)


# --- a forward that throws


@pytest.mark.parametrize(("schedule", "stage"), each_once(SCHEDULES, ["middle", "first", "last"]))
def test_a_forward_that_throws(script: Script, schedule: str, stage: str) -> None:
    placement = choose(schedule).place(3)
    number = {"first": 0, "middle": placement.stages // 2, "last": placement.stages - 1}[stage]
    failing = placement.rank_of[number]
    chunk = placement.stages_of[failing].index(number)
    results = end_of(
        script,
        3,
        pipeline_flags(3, 6, pipeline_schedule=schedule),
        Fault(failing, chunk, 6 + 3, throws=True),
    )
    assert {result.exit_code for result in results} == {1}
    own = results[failing]
    raised = rf"^\[rank\d\]: ValueError: {BROKEN}"
    assert re.search(raised, own.stderr, re.MULTILINE), own.stderr
    host = re.escape(socket.gethostname())
    assert re.search(
        rf"^\[rank{failing}\]: megatron_ext: pipeline rank {failing}, in {number}F3 "
        rf"\[pipeline rank {failing} is global rank {failing}, local rank {failing} on {host}; "
        rf"iteration 2; [-\d]+ [:\d]+\]$",
        own.stderr,
        re.MULTILINE,
    ), own.stderr
    for rank, result in enumerate(results):
        if rank != failing:
            # On a busy machine the store may report the failure before the connection breaks, or
            # even before the rank waits for its peer. The message then quotes the peer's error.
            assert re.search(
                rf"PeerFailure: pipeline rank {rank} was (waiting for|at) ", result.stderr
            ), result.stderr
            assert not re.search(raised, result.stderr, re.MULTILINE), result.stderr


# --- data that ends early


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """Run a forward step that reads the iterator only on the stages that use data, as real training
    does."""
    ends = model.pre_process or model.post_process
    unread = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return callers.forward_step(data if ends else iter([unread]), model)


def step(
    chunks: list[GPTModel], items: int, microbatches: int, forward_only: bool = False
) -> list[Any]:
    """Run one step on iterators of ``items`` microbatches, and return the losses of this rank."""
    generator = torch.Generator().manual_seed(2)
    data = [torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator) for _ in range(items)]
    return stock_schedules.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(data) for _ in chunks],
        model=chunks,
        num_microbatches=microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


def chunks_for(schedule: str, ranks: int) -> list[GPTModel]:
    """Create the process groups, and return this rank's chunks of a small model."""
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=2 if schedule == "zb-v" else None,
    )
    model_parallel_cuda_manual_seed(0)
    torch.manual_seed(1)
    return build_chunks(V_LAYOUT) if schedule == "zb-v" else [build_model()]


@pytest.mark.real_time
@pytest.mark.parametrize(("schedule", "ranks"), [("zb-h1", 4), ("zb-v", V_RANKS)])
def test_data_that_end_early(schedule: str, ranks: int) -> None:
    """A data iterator with three microbatches, in a step of four, gives an error that names the
    iterator. The rank that reads the data used to end with a bare StopIteration."""

    def on_rank(rank: int) -> list[str]:
        with apply(cpu.patches()), megatron_ext.install(schedule=schedule):
            chunks = chunks_for(schedule, ranks)
            with pytest.raises((StopIteration, RuntimeError)) as caught:
                step(chunks, items=3, microbatches=4)
            # the failed rank continues for a second, which must not delay the errors of the others
            time.sleep(1)
            return [f"{caught.typename}: {caught.value}", *caught.value.__notes__]

    results = run_ranks(ranks, on_rank)
    errors = values(results)
    first = choose(schedule).place(ranks).rank_of[0]
    for rank, (error, *notes) in enumerate(errors):
        if rank == first:
            assert error == "StopIteration: "
            assert notes[0].startswith(f"megatron_ext: pipeline rank {rank}, in 0F3 [")
            assert "the data iterator has ended; a step of 4 microbatches" in notes[2]
        else:
            assert "PeerFailure: pipeline rank" in error or "StopIteration" in error


# --- a batch that grows


@contextlib.contextmanager
def counting_builds(folder: Path) -> Iterator[Path]:
    """Yield a file with a line for each program that a rank builds in the context: rank,
    microbatches, and whether the program is for an evaluation."""
    build, file = programs.place_output_layer, folder / "builds"

    def counted(resolved: Any, problem: Problem) -> Program:
        with open(file, "a") as lines:
            lines.write(f"{dist.get_rank()} {problem.microbatches} {problem.forward_only}\n")
        return build(resolved, problem)

    programs.place_output_layer = counted
    try:
        yield file
    finally:
        programs.place_output_layer = build


# The batch grows by a schedule of Megatron in tokens (16 a sample), because --rampup-batch-size
# does nothing in Megatron 0.19. The eight steps have 2, 2, 4, 4, 6, 6, 8 and 8 microbatches.
RAMPED: dict[str, object] = {
    "pipeline_model_parallel_size": 2,
    "global_batch_size": None,
    "train_iters": None,
    "train_samples": 40,
    "step_batch_size_schedule": "0:2 64:4 192:6 384:8",
}


def ramped(**flags: object) -> list[Run]:
    return train(2, model_flags(**RAMPED, **flags))


def test_a_batch_that_grows(tmp_path: Path) -> None:
    """A training whose batch grows builds one program for each number of microbatches, and uses it
    again in later steps of that size."""
    reference = ramped(save=tmp_path / "at 2", save_interval=2)
    assert len(losses(reference)) == 8
    with counting_builds(tmp_path) as file:
        assert_same(ramped(pipeline_schedule="zb-h1"), reference)
    built = Counter(file.read_text().splitlines())
    assert built == {f"{rank} {m} False": 1 for rank in range(2) for m in (2, 4, 6, 8)}
    runs = ramped(pipeline_schedule="zb-v", load=tmp_path / "at 2", ckpt_step=2)
    assert len(losses(runs)) == len(losses(reference)) - 2
    assert_same(runs, reference)


# --- evaluation of another size


def test_evaluation_of_another_size(tmp_path: Path) -> None:
    """An evaluation may have fewer microbatches than a training step, and more samples in each."""
    flags: dict[str, object] = {
        "eval_iters": 2,
        "eval_interval": 2,
        "eval_global_batch_size": 6,
        "eval_micro_batch_size": 2,
    }
    with counting_builds(tmp_path) as file:
        reference = train(2, pipeline_flags(2, 4, **flags))
        assert evaluations(reference)
        runs = train(2, pipeline_flags(2, 4, pipeline_schedule="zb-h1", **flags))
        assert_same(runs, reference)
        assert evaluations(runs) == evaluations(reference)
    assert Counter(file.read_text().splitlines()) == {
        f"{rank} {m} {only}": 1 for rank in range(2) for m, only in ((4, False), (3, True))
    }
