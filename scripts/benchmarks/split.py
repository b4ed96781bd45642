"""Measure what splitting the backward costs: I and W of a transformer layer, compared with B.

    python -m scripts.benchmarks.split
    python -m scripts.benchmarks.split --hidden 1024 --sequence 1024

One process, one layer of Megatron's local kind, on a GPU if there is one. Whole and split backward
take turns, so that what disturbs one disturbs the other; the ratio is that of their medians.

On a CPU malloc keeps what is freed, as CUDA's caching allocator does. By default glibc returns
freed memory to the system and gets it back in the next backward. Each 4 KiB that waits for W then
causes a page fault, which counts as a cost of the split; ``--hand-memory-back`` shows this.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track

from megatron_ext.config import PipelineConfig
from megatron_ext.launch.script import CPU_PLATFORM
from scripts.benchmarks.harness import arguments

GPU = torch.cuda.is_available()


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(
        __doc__,
        argv,
        hidden=(512, "hidden size"),
        sequence=(512, "tokens of a microbatch"),
        repetitions=(100, "of each pass"),
        hand_memory_back=(False, "on a CPU, with malloc as it comes"),
    )
    if not GPU and not given.hand_memory_back:
        keep_memory()
    result = measure(given.hidden, given.sequence, given.repetitions)
    settings = {
        **vars(given),
        "device": torch.cuda.get_device_name() if GPU else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    for key, value in (settings | result).items():
        print(f"{key}: {value}")
    return 0


def keep_memory() -> None:
    """Let glibc's malloc keep freed memory.

    It may not allocate by mmap either, as such memory is returned to the system.
    """
    trim_threshold, mmap_max = -1, -4  # parameters of malloc (malloc.h)
    libc = ctypes.CDLL(None)
    assert libc.mallopt(trim_threshold, 2**31 - 1) and libc.mallopt(mmap_max, 0)


def measure(hidden_size: int, sequence: int, repetitions: int) -> dict[str, float]:
    """Return the median milliseconds of B, I and W, and the ratio (I + W) / B.

    On a CPU the median number of page faults is returned too.
    """
    from megatron_ext.patches import engine

    if not GPU:
        cpu = importlib.import_module(CPU_PLATFORM)
        os.environ |= cpu.environment(os.environ)
        torch.set_num_threads(1)
        engine.apply(cpu.patches())
    layers = importlib.import_module("megatron_ext.patches.megatron.core.tensor_parallel.layers")
    engine.apply(layers.patches(PipelineConfig(schedule="zb-h1")))
    layer = _layer(hidden_size)
    x = torch.randn(sequence, 1, hidden_size, device="cuda" if GPU else "cpu")
    dy = torch.randn_like(x)
    costs: dict[str, list[Cost]] = {"B": [], "I": [], "W": []}
    for repetition in track(range(repetitions + 3), transient=True, console=Console(stderr=True)):
        in_turn = [_unsplit, _split] if repetition % 2 else [_split, _unsplit]
        for backward in in_turn:
            for name, cost in backward(layer, x, dy).items():
                if repetition >= 3:
                    costs[name].append(cost)
    median = {
        name: Cost(*map(statistics.median, zip(*samples, strict=True)))
        for name, samples in costs.items()
    }
    both = [i.seconds + w.seconds for i, w in zip(costs["I"], costs["W"], strict=True)]
    result = {f"{name}, ms": round(1000 * cost.seconds, 3) for name, cost in median.items()}
    if not GPU:
        result |= {f"{name}, page faults": cost.page_faults for name, cost in median.items()}
    ratio = statistics.median(both) / median["B"].seconds
    return result | {"(I + W) / B": round(ratio, 3)}


class Cost(NamedTuple):
    """Seconds and page faults of one pass."""

    seconds: float
    page_faults: float


def _layer(hidden_size: int) -> torch.nn.Module:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    dist.init_process_group("nccl" if GPU else "gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 64,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not GPU,
    )
    layer = build_module(get_gpt_layer_local_spec(), config=config)
    return layer.cuda() if GPU else layer


def _unsplit(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Cost]:
    y = _forward(layer, x)
    costs = {"B": _cost(lambda: y.backward(dy))}
    layer.zero_grad(set_to_none=False)
    return costs


def _split(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Cost]:
    from megatron_ext.runtime.weight_gradients import queue

    queue.splitting = True
    y = _forward(layer, x)
    queue.splitting = False
    with queue.collecting(0, 0):
        costs = {"I": _cost(lambda: y.backward(dy))}
    costs["W"] = _cost(lambda: queue.run(0, 0))
    layer.zero_grad(set_to_none=False)
    return costs


def _forward(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x.detach().requires_grad_(), attention_mask=None)[0]


def _cost(run: Callable[[], None]) -> Cost:
    """Call ``run``, and return its cost.

    On a CPU only the seconds of this process count, as other processes may use the machine too.
    """
    if GPU:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return Cost(time.perf_counter() - start, 0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.process_time()
    run()
    seconds = time.process_time() - start
    return Cost(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


if __name__ == "__main__":
    sys.exit(main())
