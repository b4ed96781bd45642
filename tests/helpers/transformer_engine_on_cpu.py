"""Transformer Engine's own Python classes on the CPU, in several versions, for forked processes.

Its wheel on PyPI contains only the Python sources, which are fetched once. Torch operations stand
in for its compiled extension: GEMMs, norms, activations and, in `quantization_on_cpu`,
quantisation. There is no attention and no communication.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import importlib.machinery
import itertools
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tests.helpers import quantization_on_cpu as quantization
from tests.helpers.fetched import fetched
from tests.helpers.userbuffers_on_cpu import multiply_and_communicate

# Tested versions of Transformer Engine. The nightly workflow adds the newest one.
VERSIONS = tuple(
    dict.fromkeys(
        ("2.8.0", "2.12.0", "2.20.2", os.environ.get("NEWEST_TRANSFORMER_ENGINE", "2.20.2"))
    )
)


def fetch(version: str) -> Path:
    """Return the folder with Transformer Engine's Python sources; skip the test if they cannot be
    fetched."""
    return fetched("transformer_engine", version)


def load(folder: Path, capability: tuple[int, int] = (8, 0)) -> Any:
    """Return ``transformer_engine.pytorch`` from ``folder``. This changes torch, so call it in a
    forked process only.

    Its layers run on the CPU platform's patches of torch. It takes the device for a GPU of
    ``capability``: FP8 needs (9, 0), MXFP8 and NVFP4 need (10, 0).
    """
    sys.path.insert(0, str(folder))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # keeps Transformer Engine from loading its libraries
    # Lets Transformer Engine's Python code update scales.
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"
    os.environ["NVTE_TORCH_COMPILE"] = "0"  # keeps Transformer Engine from compiling Python code
    torch.version.cuda = "13.0"
    sys.modules["transformer_engine_torch"] = Extension("transformer_engine_torch")
    # Transformer Engine imports these packages for functions that the tests do not call.
    for name in ("onnx", "onnxscript", "einops"):
        sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))
    torch.compiler.set_stance("force_eager")
    major, minor = capability
    gpu = SimpleNamespace(major=major, minor=minor, multi_processor_count=1)
    cuda = {
        "is_available": lambda: True,
        "get_device_properties": lambda device=None: gpu,
        "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "is_current_stream_capturing": lambda: False,
        "device": lambda device: contextlib.nullcontext(),
        "nvtx": MagicMock(),
    }
    for name, meaning in cuda.items():
        setattr(torch.cuda, name, meaning)
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment]
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    loaded = importlib.import_module("transformer_engine.pytorch")
    distributed: Any = importlib.import_module("transformer_engine.pytorch.distributed")
    distributed._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    return loaded


class _Numbered(type):
    """An enumeration such as ``CommOverlapType``, with any members that a program reads."""

    numbers = itertools.count()

    @property
    def __members__(cls) -> dict[str, int]:
        return {name: value for name, value in vars(cls).items() if not name.startswith("__")}

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, number := next(_Numbered.numbers))
        return number


DType = enum.IntEnum(
    "DType",
    "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    start=0,
)


FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
    start=0,
)


class Extension(types.ModuleType):
    """Stands in for the compiled ``transformer_engine_torch``.

    An operation that is not defined below is an empty class, and layers that call it fail.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.DType = DType
        self.FP8FwdTensors, self.FP8BwdTensors = FP8FwdTensors, FP8BwdTensors
        for operation in OPERATIONS:
            setattr(self, operation.__name__, torch.no_grad()(operation))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := _Numbered(name, (), {}))
        return made


def get_num_cublas_streams() -> int:
    return 1


def generic_gemm(
    a: Tensor,
    transpose_a: bool,
    b: Tensor,
    transpose_b: bool,
    out: Tensor | None,
    quantizer: None,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, Tensor | None]:
    """Return b times a, columns first as cuBLAS counts, with a bias added or with the bias's
    gradient."""
    assert quantizer is None and not gelu
    comm, extra = overlap.get("comm_overlap"), overlap.get("extra_output")
    multiply = functools.partial(_multiply, a, transpose_a, b, transpose_b)
    if comm is None:
        assert not any(v for k, v in overlap.items() if k not in ("alpha", "beta"))
        made = multiply()
    else:
        made = multiply_and_communicate(
            multiply, comm, overlap["comm_type"], extra, overlap["bulk_overlap"]
        )
    if _is_quantized(a) and out is None and out_dtype == DType.kBFloat16:
        made = made.bfloat16()
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = b.reshape(-1, b.shape[-1]).sum(0)
    elif bias is not None:
        made = made + bias
    return _write(made, out, accumulate, out_dtype), bias_gradient, None, extra


def te_general_grouped_gemm(
    a: list[Tensor],
    transpose_a: bool,
    b: list[Tensor],
    transpose_b: bool,
    out: list[Tensor],
    out_dtype: Any,
    splits: list[int],
    bias: list[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *rest: Any,
) -> list[Tensor]:
    outputs = list(out[0].split(splits)) if single_output else out
    for index in range(len(a)):
        made = _multiply(a[index], transpose_a, b[index], transpose_b)
        if bias[index].numel() and grad:
            bias[index].copy_(b[index].sum(0))
        elif bias[index].numel():
            made = made + bias[index]
        _write(made, outputs[index], accumulate, None)
    return bias


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Any, quantizer: Any, *rest: Any
) -> tuple[Any, Tensor, Tensor]:
    normed, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _quantized(normed, quantizer), mean, scale


def layernorm_bwd(
    dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], mean, scale, weight, weight, [True, True, True]
    )


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, *rest: Any
) -> tuple[Any, None, Tensor]:
    scale = (x.square().mean(-1) + eps).rsqrt()
    return _quantized(x * scale[:, None] * weight, quantizer), None, scale


def rmsnorm_bwd(
    dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    normed = x * scale[:, None]
    dnormed = dy * weight
    dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * scale[:, None]
    return dx, (dy * normed).sum(0)


def relu(x: Tensor, quantizer: None) -> Tensor:
    return x.relu()


def drelu(dy: Tensor, x: Tensor, quantizer: None) -> Tensor:
    return dy * (x > 0)


def _multiply(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> Tensor:
    """Return the product, with all dimensions except the last taken as one. The product has the
    dimensions of b unless b is transposed."""
    a, b = quantization.operand(a, transpose_a), quantization.operand(b, not transpose_b)
    rows, columns = b.reshape(-1, b.shape[-1]), a.reshape(-1, a.shape[-1])
    made = (rows.t() if transpose_b else rows) @ (columns.t() if transpose_a else columns)
    return made if transpose_b else made.reshape(*b.shape[:-1], made.shape[-1])


def _is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "_quantizer")


def _quantized(tensor: Tensor, quantizer: Any) -> Any:
    return tensor if quantizer is None else quantization.quantize(tensor, quantizer)


def _write(made: Tensor, out: Tensor | None, accumulate: bool, dtype: Any) -> Tensor:
    if out is None:
        return made
    return out.add_(made) if accumulate else out.copy_(made)


OPERATIONS = (
    get_num_cublas_streams,
    generic_gemm,
    te_general_grouped_gemm,
    layernorm_fwd,
    layernorm_bwd,
    rmsnorm_fwd,
    rmsnorm_bwd,
    relu,
    drelu,
    *quantization.OPERATIONS,
)
