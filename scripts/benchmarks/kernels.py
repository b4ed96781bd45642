"""Seconds of a layer's kernels on this GPU, and the seconds that the cost model estimates for them.

    python -m scripts.benchmarks.kernels --gpu h200

Every kernel runs on random data for a quarter of a second, of which the second half is timed: a GPU
whose power is limited slows down within the first tenth. The estimates do not know these
measurements: the last column, estimated over measured seconds, says how good they are.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.gpus import parse_gpu
from megatron_ext.cost_model.operations.operation import (
    Engine,
    Operation,
    attention_operation,
    linear,
    passing_over,
)
from megatron_ext.cost_model.rates import Rates
from megatron_ext.runtime.measure.operation_time import sustained_seconds
from scripts.benchmarks.harness import arguments, print_table

TIMED = 0.25  # seconds for which each kernel is timed
TOKENS = 8192
# Sizes of a model: hidden size, width of queries, keys and values together, and width of the MLP.
MODELS = {"Llama-3 8B": (4096, 6144, 14336), "Llama-3 70B": (8192, 10240, 28672)}
TENSOR_PARALLEL = (1, 2, 4, 8)
# Sizes of experts: number of experts on a rank, rows of all of them, hidden size, width of an
# expert.
EXPERTS = {
    "DeepSeek-V3, EP 32": (8, 32768, 7168, 2048),
    "Qwen3-235B, EP 32": (4, 16384, 4096, 1536),
}
# Sizes of attention: number of heads, their width, tokens.
ATTENTION = ((32, 128, 4096), (32, 128, 8192), (8, 128, 32768))
PASSES = ("F", "I", "W")


@dataclass(frozen=True)
class Row:
    """Measured and estimated seconds of one kernel."""

    group: str
    kernel: str
    measured: float
    estimated: float

    @property
    def ratio(self) -> float:
        return self.estimated / self.measured


def seconds(kernel: Callable[[], object]) -> float:
    """Return the seconds of one call of ``kernel`` when it runs without pause."""
    return sustained_seconds(kernel, TIMED)


def products(rates: Rates, precision: Precision) -> Iterator[Row]:
    """Yield the matrix products of dense layers, for each tensor-parallel size."""
    execution = Execution(TOKENS, precision=precision)
    for model, (hidden_size, heads, width) in MODELS.items():
        for ranks in TENSOR_PARALLEL:
            shapes = {
                "qkv": (hidden_size, heads // ranks),
                "projection": (hidden_size // ranks, hidden_size),
                "fc1": (hidden_size, 2 * width // ranks),
                "fc2": (width // ranks, hidden_size),
            }
            for name, (inner, outer) in shapes.items():
                operation = linear(name, TOKENS, inner, outer, execution)[0]
                assert operation.product is not None
                estimated = rates.seconds_of(operation)
                for which, shape, estimate in zip(
                    PASSES, operation.product.shapes, estimated, strict=True
                ):
                    multiply = _product(shape, precision, is_gradient=which == "W")
                    kernel = f"{model}, TP {ranks}, {name}, {which}"
                    yield Row(f"products in {precision}", kernel, seconds(multiply), estimate)


def _product(
    shape: tuple[float, float, float], precision: Precision, *, is_gradient: bool
) -> Callable[[], Tensor]:
    rows, columns, depth = map(int, shape)
    left = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16).t()
    if precision is Precision.BF16:
        return lambda: left @ right
    a, b = left.to(torch.float8_e4m3fn), right.t().to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    out = torch.float32 if is_gradient else torch.bfloat16
    return lambda: torch._scaled_mm(a, b, one, one, out_dtype=out)


def grouped_products(rates: Rates) -> Iterator[Row]:
    """Yield the matrix product of the experts' first layer in the forward pass. Each expert has the
    same number of rows."""
    for model, (experts, rows, hidden_size, width) in EXPERTS.items():
        (operation,) = linear(
            "fc1",
            rows,
            hidden_size,
            2 * width,
            Execution(rows),
            engine=Engine.GROUPED,
            weights=experts,
        )
        tokens = torch.randn(rows, hidden_size, device="cuda", dtype=torch.bfloat16)
        matrices = torch.randn(experts, hidden_size, 2 * width, device="cuda", dtype=torch.bfloat16)
        ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
        measured = seconds(partial(torch._grouped_mm, tokens, matrices, offs=ends))
        yield Row("grouped products", f"{model}, fc1, F", measured, rates.seconds_of(operation)[0])


def attention(rates: Rates) -> Iterator[Row]:
    """Yield fused causal attention, forward and backward, by PyTorch's kernel and by cuDNN's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for heads, width, tokens in ATTENTION:
        operation = attention_operation(
            "attention",
            2 * tokens * (tokens / 2) * 2 * heads * width,
            (0.0, 0.0),
            recomputed_flops=2 * tokens * (tokens / 2) * heads * width,
        )
        forward, backward, _ = rates.seconds_of(operation)
        q, k, v = (
            torch.randn(
                1, heads, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True
            )
            for _ in "qkv"
        )
        for name, backend in (
            ("flash", SDPBackend.FLASH_ATTENTION),
            ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ):
            with sdpa_kernel(backend):
                attend = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True)
                out = attend()
                gradient = torch.randn_like(out)
                kernel = f"{heads} heads of {width}, {tokens} tokens, {name}"
                yield Row("attention", f"{kernel}, F", seconds(attend), forward)
                differentiate = partial(
                    torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True
                )
                yield Row("attention", f"{kernel}, I", seconds(differentiate), backward)


def memory_bound(rates: Rates) -> Iterator[Row]:
    """Yield the forward of kernels that only move bytes."""
    execution = Execution(TOKENS)
    hidden_size, _, width = MODELS["Llama-3 8B"]
    x, y = (torch.randn(TOKENS, hidden_size, device="cuda", dtype=torch.bfloat16) for _ in "12")
    gates = torch.randn(TOKENS, 2 * width, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(hidden_size, device="cuda", dtype=torch.bfloat16)

    @torch.compile
    def swiglu(gates: Tensor) -> Tensor:
        gate, up = gates.chunk(2, -1)
        return functional.silu(gate) * up

    def row(kernel: str, call: Callable[[], object], operation: Operation) -> Row:
        return Row("memory-bound", kernel, seconds(call), rates.seconds_of(operation)[0])

    elements = TOKENS * hidden_size
    norm = passing_over("norm", elements, (2, 3), execution)
    residual = passing_over("residual", elements, (3, 3), execution)
    activation = passing_over("swiglu", TOKENS * width, (3, 5), execution)
    yield row("RMSNorm", lambda: functional.rms_norm(x, (hidden_size,), scale), norm)
    yield row("residual", lambda: x + y, residual)
    yield row("SwiGLU", lambda: swiglu(gates), activation)


def main() -> None:
    gpu = parse_gpu(arguments(__doc__, None, gpu=("h200", "what `plan --gpu` calls this GPU")).gpu)
    rates = gpu.rates()
    groups = [
        memory_bound(rates),
        attention(rates),
        grouped_products(rates),
        products(rates, Precision.BF16),
        products(gpu.rates(Precision.FP8), Precision.FP8),
    ]
    rows: dict[str, list[Row]] = defaultdict(list)
    for group in groups:
        try:
            for row in group:
                rows[row.group].append(row)
                words = f"{row.measured * 1e6:.0f} us, estimated {row.estimated * 1e6:.0f}"
                print(f"{row.group}: {row.kernel}: {words}, {row.ratio:.2f}", flush=True)
        except RuntimeError as error:  # a kernel that this torch or GPU lacks
            print(f"{type(error).__name__}: {error}".partition("\n")[0], flush=True)
    ratios = {name: sorted(row.ratio for row in some) for name, some in rows.items()}
    print_table(
        ("kernels", "number", "estimated over measured: median", "least", "most"),
        (
            (name, len(some), *(f"{x:.2f}" for x in (statistics.median(some), some[0], some[-1])))
            for name, some in ratios.items()
        ),
    )


if __name__ == "__main__":
    main()
