"""Measure what splitting the backward costs: I and W of a transformer layer, beside its whole B.

    python scripts/benchmark_split.py
    python scripts/benchmark_split.py --hidden 1024 --sequence 1024 --json

One process, one layer of Megatron's local kind, on a GPU if there is one. Whole and split backward
take turns, so that what disturbs one disturbs the other; the ratio is that of their medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import track

from megatron_ext.config import PipelineConfig
from megatron_ext.launch import CPU_PLATFORM

GPU = torch.cuda.is_available()


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=512, help="tokens of a microbatch")
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)
    result = measure(arguments.hidden, arguments.sequence, arguments.repetitions)
    settings = {
        "hidden": arguments.hidden,
        "sequence": arguments.sequence,
        "repetitions": arguments.repetitions,
        "device": torch.cuda.get_device_name() if GPU else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    if arguments.json:
        print(json.dumps(settings | result, indent=2))
    else:
        for key, value in (settings | result).items():
            Console().print(f"{key}: {value}")
    return 0


def measure(hidden: int, sequence: int, repetitions: int) -> dict[str, float]:
    """Median milliseconds of B, I and W, and (I + W) / B."""
    from megatron_ext.patches import engine

    if not GPU:
        cpu = importlib.import_module(CPU_PLATFORM)
        os.environ |= cpu.environment(os.environ)
        torch.set_num_threads(1)
        engine.apply(cpu.patches())
    layers = importlib.import_module("megatron_ext.patches.megatron.core.tensor_parallel.layers")
    engine.apply(layers.patches(PipelineConfig(schedule="zb-h1")))
    layer = _layer(hidden)
    x = torch.randn(sequence, 1, hidden, device="cuda" if GPU else "cpu")
    dy = torch.randn_like(x)
    times: dict[str, list[float]] = {"B": [], "I": [], "W": []}
    for repetition in track(range(repetitions + 3), transient=True, console=Console(stderr=True)):
        for name, seconds in (_whole(layer, x, dy) | _split(layer, x, dy)).items():
            if repetition >= 3:
                times[name].append(seconds)
    median = {name: 1000 * statistics.median(each) for name, each in times.items()}
    both = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    return {
        **{f"{name}, ms": round(value, 3) for name, value in median.items()},
        "(I + W) / B": round(statistics.median(both) / statistics.median(times["B"]), 3),
    }


def _layer(hidden: int) -> torch.nn.Module:
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
        hidden_size=hidden,
        num_attention_heads=hidden // 64,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=not GPU,
    )
    layer: torch.nn.Module = build_module(get_gpt_layer_local_spec(), config=config)
    return layer.cuda() if GPU else layer


def _whole(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, float]:
    y = _forward(layer, x)
    seconds = {"B": _seconds(lambda: y.backward(dy))}
    layer.zero_grad(set_to_none=False)
    return seconds


def _split(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, float]:
    from megatron_ext.runtime.weight_gradients import queue

    queue.splitting = True
    y = _forward(layer, x)
    queue.splitting = False
    with queue.collecting(0, 0):
        seconds = {"I": _seconds(lambda: y.backward(dy))}
    seconds["W"] = _seconds(lambda: queue.run(0, 0))
    layer.zero_grad(set_to_none=False)
    return seconds


def _forward(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(x.detach().requires_grad_(), attention_mask=None)[0]
    return y


def _seconds(run: Callable[[], None]) -> float:
    """On a CPU those of this process, as others may use the machine, too."""
    if not GPU:
        start = time.process_time()
        run()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
