"""Tests that list every call of ours in which a host may wait for its device, with the reason why
it may.

A device may wait for a message whose sender waits for this rank. If the host then waits for the
device or for a whole stream, the job hangs (a benchmark of Inductor's did so in the first pass of
each rank). Within a step the host therefore waits only for the event of an earlier pass. All that a
program has posted before a pass can end without anything this rank does later (`prove`), so that
wait ends, and so does a wait after the last action of a rank.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUNNING = ("megatron_ext/runtime", "megatron_ext/adapter", "megatron_ext/features", "patches")

# Calls of torch that wait for the device, for a stream, or for an event on a stream.
WAITING = {
    *("synchronize", "item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique"),
    *("equal", "allclose", "is_nonzero", "elapsed_time", "empty_cache", "mem_get_info"),
    *("cudaHostRegister", "cudaHostUnregister", "cudaFree", "pin_memory", "barrier"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
}
# Calls of Python that wait for the device if their argument is a tensor on it.
NUMBERS = {"int", "float", "bool"}

# The allowed waits by reason: file, function, call.
ALLOWED: dict[str, set[tuple[str, str, str]]] = {
    "within a step: for an earlier pass, by its event": {
        (
            "megatron_ext/runtime/device_progress.py",
            "DeviceProgress.hold_back",
            "self._passes.popleft().synchronize()",
        ),
    },
    "before the first step, or the first with so many microbatches": {
        (
            "megatron_ext/runtime/messages/nccl.py",
            "ctas_for",
            "dist.all_gather_object(multiprocessors, here, group=pipeline)",
        ),
        (
            "megatron_ext/runtime/rank_identity.py",
            "rank_identity",
            "dist.all_gather_object(processes, _this_process(), group=pipeline)",
        ),
        (
            "megatron_ext/adapter/programs.py",
            "gather",
            "dist.all_gather_object(values, value, group=group)",
        ),
        ("megatron_ext/adapter/tied.py", "_checksum", "int(bits_of(table).sum(dtype=torch.int64))"),
    },
    "in a first step that is compared with Megatron's own": {
        ("megatron_ext/adapter/stock/compared_step.py", "_compared", "result.cpu()"),
        (
            "megatron_ext/adapter/stock/compared_step.py",
            "_difference",
            "float(difference.nan_to_num_(nan=math.inf, posinf=math.inf).max())",
        ),
    },
    "of numbers in numpy's arrays, which no device has": {
        (
            "megatron_ext/features/arrangement/adapter/arranged_batches.py",
            "ArrangedBatches.__iter__",
            "rows[replica].tolist()",
        ),
        (
            "megatron_ext/features/arrangement/adapter/arranged_batches.py",
            "ArrangedSteps._arranged",
            "microbatches[rows[self._sampler.data_parallel_rank]].ravel().tolist()",
        ),
        (
            "megatron_ext/features/arrangement/adapter/document_lengths.py",
            "packed_squares",
            "samples.tolist()",
        ),
        (
            "megatron_ext/features/arrangement/adapter/document_lengths.py",
            "_of_blend",
            "np.unique(of_dataset)",
        ),
        (
            "megatron_ext/adapter/step/ordered_calls.py",
            "order_microbatches.call",
            "small_ends(np.array(agreed)).tolist()",
        ),
    },
    "within the first forward pass of a microbatch, which ends: where its documents begin": {
        ("megatron_ext/adapter/slices/packs.py", "read_pack", "params.cu_seqlens_q.tolist()"),
        ("megatron_ext/adapter/slices/packs.py", "read_pack", "padded.tolist()"),
    },
    "of tensors of the host only": {
        ("megatron_ext/features/shared_prompts/adapter/batch.py", "_numbers", "given.tolist()"),
    },
    "before the first pass of a step, where a caller orders its microbatches": {
        (
            "megatron_ext/adapter/step/ordered_calls.py",
            "_of_first",
            "dist.all_gather_object(gathered, costs, group=group)",
        ),
        (
            "megatron_ext/adapter/step/ordered_calls.py",
            "order_microbatches.call",
            "float(cost(item))",
        ),
    },
    "between steps, or after a row's last action": {
        ("megatron_ext/runtime/host/copies.py", "_Event.finish", "self.event.synchronize()"),
        (
            "megatron_ext/runtime/host/copies.py",
            "CudaCopies.release",
            "torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())",
        ),
        (
            "megatron_ext/runtime/host/copies.py",
            "pinned",
            "runtime.cudaHostRegister(buffer.data_ptr(), size, 0)",
        ),
        (
            "megatron_ext/runtime/measure/clocks.py",
            "clock_offsets",
            "dist.all_gather_object(rounds, (entered, left), group=group)",
        ),
        ("megatron_ext/runtime/measure/clocks.py", "clock_offsets", "token.item()"),
        (  # memory is allocated once, before the first metrics
            "megatron_ext/runtime/measure/exchange.py",
            "AsyncAllGather.__init__",
            "row.pin_memory()",
        ),
        (  # waits only at the end of a training
            "megatron_ext/runtime/measure/exchange.py",
            "AsyncAllGather.wait",
            "self._event.synchronize()",
        ),
        (  # these events are known to have happened
            "megatron_ext/runtime/recording.py",
            "DeviceClock.seconds",
            "first.elapsed_time(later)",
        ),
        (
            "megatron_ext/runtime/measure/measured_steps.py",
            "MeasuredSteps.compare",
            "dist.all_gather_object(ranks, steps, group=pipeline)",
        ),
        (
            "megatron_ext/runtime/measure/operation_time.py",
            "_timed",
            "begin.elapsed_time(end)",
        ),
        ("megatron_ext/runtime/measure/operation_time.py", "_timed", "end.synchronize()"),
        ("megatron_ext/runtime/recording.py", "DeviceClock.read", "torch.cuda.synchronize()"),
        ("megatron_ext/runtime/recording.py", "DeviceClock.read", "reference.synchronize()"),
        (
            "megatron_ext/runtime/recording.py",
            "DeviceClock.read",
            "event.elapsed_time(reference)",
        ),
        (
            "megatron_ext/features/post_validation/runtime/snapshot.py",
            "_Copies.release",
            "torch.cuda.synchronize(self._device)",
        ),
        (
            "megatron_ext/features/post_validation/runtime/snapshot.py",
            "choose_place",
            "torch.cuda.mem_get_info(device)",
        ),
        (
            "megatron_ext/features/post_validation/adapter/restartable_step.py",
            "SpeculativeStep.defer_scaling",
            "int(tokens)",
        ),
        (
            "megatron_ext/features/post_validation/adapter/restartable_step.py",
            "_scale_gradients",
            "torch.tensor(tokens, dtype=torch.int, device=torch.cuda.current_device())",
        ),
        (
            "megatron_ext/features/trace/adapter/step_trace.py",
            "StepTrace.end",
            "dist.all_gather_object(gathered, of_rank, group=pipeline)",
        ),
        (
            "patches/megatron/training/training/training_log.py",
            "DeferredLog.__call__",
            "self._optimizer.get_loss_scale().item()",
        ),
    },
    "between steps that are recorded for megatron-ext parity": {
        *(
            ("megatron_ext/adapter/parity/result_recorder.py", f"ParityRecorder.{function}", call)
            for function, call in (
                ("end", "bits_of(tensor).cpu()"),
                ("end", "bits_of(tensor).cpu().numpy()"),
                ("iteration", "bool(skipped)"),
                ("iteration", "float(norm)"),
            )
        ),
        (
            "megatron_ext/adapter/parity/result_recorder.py",
            "digests",
            "torch.stack([values[place] for place in places]).tolist()",
        ),
        ("megatron_ext/adapter/parity/result_recorder.py", "logged_loss", "float(value)"),
        (
            "megatron_ext/adapter/parity/result_recorder.py",
            "logged_loss",
            "float(value[0] / value[1])",
        ),
    },
    "between steps, where all ranks meet": {
        (
            "megatron_ext/runtime/world.py",
            "told_by_rank_0",
            "dist.broadcast_object_list(told, src=0)",
        ),
        (
            "megatron_ext/runtime/world.py",
            "gather_from_all",
            "dist.all_gather_object(values, value)",
        ),
    },
    "in the optimizer: between steps, or at SETTLE, an action like others to the proof": {
        (
            "megatron_ext/features/post_validation/adapter/optimizer.py",
            "SpeculativeOptimizer.prepare",
            "float(part.get_grad_norm())",
        ),
        (
            "megatron_ext/features/post_validation/adapter/optimizer.py",
            "_found_anywhere",
            "bool(part.found_inf.item() > 0)",
        ),
        (
            "megatron_ext/features/post_validation/adapter/optimizer.py",
            "_found_anywhere",
            "part.found_inf.item()",
        ),
    },
    "a tensor of the host's, or none": {
        ("megatron_ext/runtime/measure/exchange.py", "AsyncAllGather.rows", "self._rows.tolist()"),
        ("megatron_ext/runtime/messages/transport.py", "Transport.receive", "header.tolist()"),
        (
            "megatron_ext/features/post_validation/runtime/messages.py",
            "ValidationMessages.look",
            "numbers.numpy()",
        ),
        ("megatron_ext/features/post_validation/runtime/messages.py", "_state", "numbers.tolist()"),
        ("patches/cpu.py", "_on_host", "tensor.numpy()"),
        (
            "patches/megatron/training/utils/common_utils.py",
            "in_single_precision",
            "torch.tensor(float(stat), dtype=torch.float32).item()",
        ),
    },
}
# Functions that convert numbers, texts and settings, and no tensors, to numbers.
NO_TENSORS = {
    ("megatron_ext/adapter/checkpoints/folder.py", "folder_name"),
    ("megatron_ext/adapter/checkpoints/loading.py", "_check_optimizer"),
    ("megatron_ext/adapter/checkpoints/loading.py", "_expert_tensor_parallel"),
    ("megatron_ext/adapter/checkpoints/loading.py", "_is_mixed"),
    ("megatron_ext/adapter/checkpoints/loading.py", "_moves"),
    ("megatron_ext/adapter/checkpoints/loading.py", "_why_not_judged"),
    ("megatron_ext/adapter/checkpoints/model_difference.py", "_is_by_layer"),
    ("megatron_ext/adapter/compatibility.py", "refuse_order"),
    ("megatron_ext/adapter/parity/result_recorder.py", "ParityRecorder.begin"),
    ("megatron_ext/adapter/programs.py", "Programs._compare"),
    ("megatron_ext/features/trace/settings.py", "_iterations"),
    ("megatron_ext/features/vocabulary/schedule/vocabulary.py", "_in_ticks"),
    ("megatron_ext/runtime/host/copies.py", "pinned"),
    ("megatron_ext/runtime/measure/operation_time.py", "sustained_seconds"),
    ("megatron_ext/runtime/measure/operation_time.py", "_collective_seconds"),
    ("megatron_ext/runtime/host/host_memory.py", "_left_in"),
    ("megatron_ext/runtime/host/host_memory.py", "available_bytes"),
    ("megatron_ext/features/post_validation/runtime/messages.py", "_state"),
    ("megatron_ext/runtime/rank_identity.py", "_this_process"),
    ("megatron_ext/adapter/layers.py", "layers_of_stages"),
    ("megatron_ext/features/post_validation/adapter/commit_points.py", "microbatches_will_change"),
    ("megatron_ext/adapter/step_sizes.py", "count_microbatches"),
    ("megatron_ext/adapter/training_globals.py", "ramps_up_to"),
    ("patches/engine.py", "Patch.is_needless"),
    ("patches/sources.py", "versions_of"),
    ("patches/megatron/training/utils/common_utils.py", "in_single_precision"),
}


def waits(source: str) -> Iterator[tuple[str, str]]:
    """Yield the function and the text of each call in ``source`` that may wait for the device."""
    yield from _waits(ast.parse(source), "")


def _waits(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".lstrip(".")
    if isinstance(node, ast.Call) and _may_wait(node):
        yield function, ast.unparse(node)
    for child in ast.iter_child_nodes(node):
        yield from _waits(child, function)


def _may_wait(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(attr="tensor" | "as_tensor"):
            # torch.tensor and torch.as_tensor with a device copy to the device and wait for the
            # copy.
            return any(keyword.arg == "device" for keyword in call.keywords)
        case ast.Attribute(attr=name):
            return name in WAITING
        case ast.Name(id=name):
            return name in WAITING or is_number(call)
    return False


def is_number(call: ast.Call) -> bool:
    """Return whether ``call`` converts something that may be a tensor to a number."""
    return ast.unparse(call.func) in NUMBERS and bool(call.args)


def found() -> set[tuple[str, str, str]]:
    """Return the calls that may wait, in all of our code that runs while Megatron trains."""
    files = [path for folder in RUNNING for path in sorted((ROOT / folder).rglob("*.py"))]
    return {
        (str(path.relative_to(ROOT)), function, call)
        for path in files
        for function, call in waits(path.read_text())
    }


def test_every_wait_has_its_reason() -> None:
    allowed = set().union(*ALLOWED.values())
    calls = {
        (file, function, call)
        for file, function, call in found()
        if not ((file, function) in NO_TENSORS and call.startswith(tuple(NUMBERS)))
    }
    new = sorted(calls - allowed)
    assert not new, f"may wait for the device; if it may, say why: {new}"
    gone = sorted(allowed - calls)
    assert not gone, f"there is no such call any more: {gone}"


def test_no_function_without_tensors_is_listed_in_vain() -> None:
    assert {(file, function) for file, function, _ in found()} >= NO_TENSORS


def test_the_passes_and_messages_wait_for_nothing() -> None:
    """The code that runs at every action of a step never waits for the device."""
    files = {
        f"megatron_ext/runtime/{name}.py"
        for name in ("executor", "stage_io", "stage_passes", "recorder")
    }
    files |= {
        "megatron_ext/runtime/messages/batched.py",
        "megatron_ext/runtime/messages/collectives.py",
        "megatron_ext/features/vocabulary/runtime/vocabulary_passes.py",
    }
    files |= {"megatron_ext/features/vocabulary/runtime/shard.py"}
    files |= {"megatron_ext/adapter/step/model_stage.py"}
    assert all((ROOT / file).exists() for file in files)
    assert not {entry for entry in found() if entry[0] in files}


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.synchronize()",
        "torch.cuda.current_stream().synchronize()",
        "loss.item()",
        "int(loss)",
        "float(norm)",
        "torch.cuda.empty_cache()",
        "torch.tensor([1], device=x.device)",
        "mask.nonzero()",
    ],
)
def test_a_wait_is_seen(call: str) -> None:
    source = f"class C:\n    def f(self):\n        return [{call}]"
    assert ("C.f", call) in set(waits(source))


@pytest.mark.parametrize(
    "call", ["work.wait()", "int()", "torch.tensor([1])", "event.query()", "x.float()"]
)
def test_other_calls_are_not(call: str) -> None:
    assert not list(waits(call))
