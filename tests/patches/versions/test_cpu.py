"""Tests of the platform without a GPU: its patches are undone without a trace, and flags of the
user come before its own.

Trainings on this platform take several ranks and are tested in tests/pipeline.
"""

import argparse
import logging
import multiprocessing
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.base.garbage import uncollected
from megatron_ext.patches import cpu, engine
from tests.helpers.coalesced_gathers import forbid_coalesced_gathers
from tests.helpers.combinations import nightly
from tests.helpers.ranks import HANGS, run_ranks, values

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.training", reason="needs megatron-core[training]")


@pytest.fixture
def platform() -> Iterator[engine.Handle]:
    with engine.apply(cpu.patches()) as handle:
        yield handle


def attributes(owners: list[Any]) -> dict[tuple[int, str], Any]:
    return {
        (id(owner), name): value for owner in owners for name, value in list(vars(owner).items())
    }


def test_apply_and_undo_restore_every_object() -> None:
    patches = cpu.patches()
    targets = [engine.resolve(patch.target) for patch in patches]
    owners = [module for module in sys.modules.values() if isinstance(module, types.ModuleType)]
    owners += [target.owner for target in targets if not target.in_module]
    with uncollected():  # hypothesis notes the time of a garbage collection in one of its modules
        before = attributes(owners)

        handle = engine.apply(patches)
        for target in targets:
            assert getattr(target.owner, target.name) is not target.original, target.name
        handle.undo()

        after = attributes(owners)
    assert before.keys() == after.keys()
    assert [name for key, value in before.items() if after[key] is not value for name in key] == []


@pytest.mark.parametrize("is_async", [True, False])
def test_no_coalesced_gather_reaches_gloo(is_async: bool) -> None:
    """On the CPU platform coalesced gathers are sent to gloo one by one; coalesced reductions stay
    coalesced. Two coalesced gathers of one group at the same time end gloo of torch 2.14 with a
    signal, or hang it, once in some thousand steps."""

    def gather(rank: int) -> list[float]:
        forbid_coalesced_gathers()
        with engine.apply(cpu.patches()):
            handles, wholes = [], []
            for _ in range(3):
                with torch.distributed._coalescing_manager(async_ops=is_async) as handle:
                    for length in (1, 5):
                        whole = torch.zeros(2 * length)
                        shard = whole[rank * length : (rank + 1) * length]
                        shard += rank + 1
                        torch.distributed.all_gather_into_tensor(whole, shard, async_op=is_async)
                        wholes.append(whole)
                handles.append(handle)
            with torch.distributed._coalescing_manager() as handle:
                for total in (totals := [torch.ones(1), torch.ones(2)]):
                    torch.distributed.all_reduce(total)
            for handle in handles:
                if is_async:
                    handle.wait()
        for whole in wholes:
            assert whole.tolist() == [1.0] * (len(whole) // 2) + [2.0] * (len(whole) // 2)
        return [total.sum().item() for total in totals]

    assert values(run_ranks(2, gather)) == [[2.0, 4.0]] * 2


def test_a_second_apply_finds_the_originals() -> None:
    for _ in range(2):
        with engine.apply(cpu.patches()):
            assert torch.cuda.current_device() == "cpu"


def test_every_reason_is_one_line() -> None:
    assert all(patch.reason and "\n" not in patch.reason for patch in cpu.patches())
    assert "\n" not in cpu.NOTICE


def test_no_gpu_is_faked(platform: engine.Handle) -> None:
    assert not any(patch.target == "torch.cuda:is_available" for patch in platform.patches)
    if not torch.cuda.is_available():
        assert torch.cuda.device_count() == 0


def test_megatron_counts_one_device(platform: engine.Handle) -> None:
    caller: dict[str, Any] = {"torch": torch, "__name__": "megatron.training.initialize"}
    exec("count = torch.cuda.device_count()", caller)
    assert caller["count"] == 1


def test_megatrons_optimizers_see_cuda_types(platform: engine.Handle) -> None:
    tensor = torch.zeros(1)
    caller: dict[str, Any] = {"tensor": tensor, "__name__": "megatron.core.optimizer.optimizer"}
    exec("name = tensor.type()\ndouble = tensor.type(torch.float64)", caller | {"torch": torch})
    exec("name = tensor.type()", caller)
    assert caller["name"] == "torch.cuda.FloatTensor"
    assert tensor.type() == "torch.FloatTensor"
    assert tensor.type(torch.float64).dtype is torch.float64


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), None])
def test_cuda_literals_become_cpu(platform: engine.Handle, device: Any) -> None:
    assert torch.zeros(2, device=device).device.type == "cpu"
    assert torch.tensor([1.0], device=device).device.type == "cpu"


def test_other_devices_stay(platform: engine.Handle) -> None:
    assert torch.empty(2, device="meta").device.type == "meta"


def test_a_tensor_stays_where_it_is(platform: engine.Handle) -> None:
    tensor = torch.zeros(1)
    assert tensor.cuda(non_blocking=True) is tensor


def test_one_generator_serves_host_and_device(platform: engine.Handle) -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_a_data_loader_leaves_the_generator_alone(platform: engine.Handle) -> None:
    """Creating a data iterator leaves the random state unchanged. A resumed run used to draw other
    dropout masks than an uninterrupted one.

    A data loader draws its seed from the default generator when its iterator is created, which
    happens once more after a resume. On a GPU dropout has a generator of its own; on the CPU it
    draws from the default one.
    """
    state = torch.get_rng_state()
    next(iter(torch.utils.data.DataLoader([1, 2, 3])))
    assert torch.equal(torch.get_rng_state(), state)


def write_once_changed(folder: Path, buckets: list[Any], _: Any) -> None:
    """Stand-in for Megatron's function that writes a checkpoint's files, delayed until training has
    gone on."""
    (folder / "begun").touch()
    while not (folder / "changed").exists():
        time.sleep(0.01)
    ((_, _, (_, [(item, tensor)])),) = buckets
    (folder / "being written").write_text(f"{item} {tensor.tolist()}")
    (folder / "being written").rename(folder / "written")


@pytest.mark.real_time
@nightly("its writer imports Megatron for itself; test_checkpoints.py saves so at night, too")
def test_what_is_saved_in_the_background_is_of_one_iteration(tmp_path: Path) -> None:
    """A checkpoint that is saved in the background contains the parameters of one iteration. It
    used to have half of one iteration's parameters and half of a later one's.

    The writing process shares the trainer's host tensors, and Megatron's copy of a tensor to the
    host is no copy if there is no GPU.
    """
    # The test runs in a rank, because processes that are forked later must not inherit the process
    # that multiprocessing starts to share tensors.
    values(run_ranks(1, lambda rank: save_and_go_on(tmp_path), connect=False))
    assert (tmp_path / "written").read_text() == "weight [1.0, 1.0]"


def save_and_go_on(folder: Path) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    weight = torch.ones(2)
    buckets: list[Any] = [("file", "key", ([], [("weight", weight)]))]
    request = AsyncRequest(
        write_once_changed,
        (folder, buckets, None),
        [],
        preload_fn=partial(FileSystemWriterAsync.preload_tensors, buckets, True),
    )
    context = multiprocessing.get_context("spawn")
    requests, preloaded, done = context.JoinableQueue(), context.JoinableQueue(), context.Queue()
    writer = context.Process(
        target=cpu.checkpoint_writer, args=(0, requests, preloaded, done, logging.WARNING, 10, None)
    )
    writer.start()
    preloaded.put(request.call_idx)
    requests.put(request)
    while not (folder / "begun").exists():
        assert writer.is_alive()
        time.sleep(0.01)
    weight.fill_(2.0)  # the next iteration changes the weight
    (folder / "changed").touch()
    requests.put("DONE")
    writer.join(HANGS)
    assert writer.exitcode == 0


def test_the_warning_of_the_shared_generator_is_not_logged(
    platform: engine.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, said = logging.getLogger("megatron.core.tensor_parallel.random"), BufferingHandler(9)
    monkeypatch.setattr(logger, "handlers", [said])
    logger.warning("CPU RNG state changed within GPU RNG context")
    logger.warning("something else")
    assert [record.getMessage() for record in said.buffer] == ["something else"]


def test_default_flags_are_megatrons() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args, unknown = parser.parse_known_args(cpu.default_flags([]))
    assert unknown == []
    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    assert not args.masked_softmax_fusion
    assert not args.gradient_accumulation_fusion
    assert not args.apply_rope_fusion
    assert args.no_persist_layer_norm


def test_default_flags_leave_out_what_is_given() -> None:
    given = ["--transformer-impl=local", "--distributed-backend", "gloo", "--no-rope-fusion"]
    assert cpu.default_flags(given) == [
        "--no-masked-softmax-fusion",
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
    ]


@pytest.mark.parametrize(
    ("argv", "value", "fix"),
    [
        (["--transformer-impl", "transformer_engine"], "transformer_engine", "local"),
        (["--transformer-impl=transformer_engine"], "transformer_engine", "local"),
        (["--distributed-backend", "nccl"], "nccl", "gloo"),
        (["--context-parallel-size", "2"], "2", "--context-parallel-size 1"),
        (["--num-experts", "8", "--moe-grouped-gemm"], "--moe-grouped-gemm", "leave the flag out"),
        (["--use-flash-attn", "--bf16"], "--use-flash-attn:", "leave"),
    ],
)
def test_default_flags_refuse_what_needs_a_gpu(argv: list[str], value: str, fix: str) -> None:
    with pytest.raises(ValueError, match="GPU") as error:
        cpu.default_flags(argv)
    assert value in str(error.value)
    assert fix in str(error.value)


@pytest.mark.parametrize(
    "argv",
    [
        ["--context-parallel-size", "1"],
        ["--use-distributed-optimizer", "--load", "x"],
    ],
)
def test_default_flags_accept_what_works(argv: list[str]) -> None:
    assert "gloo" in cpu.default_flags(argv)


@pytest.mark.parametrize(
    ("given", "interface"),
    [
        ({}, "lo"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, "lo"),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, None),
        ({"WORLD_SIZE": "8"}, None),
    ],
)
def test_environment(given: dict[str, str], interface: str | None) -> None:
    environment = cpu.environment(given)
    assert environment.get("GLOO_SOCKET_IFNAME") == interface
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"


def test_environment_comes_before_torch() -> None:
    code = (
        "import sys; from megatron_ext.patches import cpu; cpu.environment({}); "
        "cpu.default_flags([]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=HANGS).returncode == 0
