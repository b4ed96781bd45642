"""Estimate by schedule, without a GPU, what PyTorch's allocator reserves beyond what is allocated.

    python -m scripts.fragmentation            # a table, in Markdown
    python -m scripts.fragmentation zb-v R     # rows in whose name one of these stands

It is a model, not measured. Megatron's own layers of real dimensions, and the runtime with its
messages and copies to the host, run on the meta device, where tensors have sizes and no memory.
Their allocations are replayed through a model of the allocator (`scripts/caching_allocator.py`).
Attention and norms save what fused kernels save; routing is even. It does not know the temporary
memory of kernels, the optimizer's and NCCL's own buffers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import pickle
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # before torch is imported
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import megatron_ext
from megatron_ext.patches.engine import apply
from megatron_ext.runtime.host import buffers, memory, offload
from megatron_ext.runtime.host.copies import DirectCopies, Done
from megatron_ext.runtime.messages import channels
from megatron_ext.runtime.messages.channels import Channels
from scripts.caching_allocator import CachingAllocator

RANKS, MICROBATCHES, STEPS = 4, 8, 2
SEQUENCE = 8192

LLAMA: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
}
# Experts of one rank in eight, which has the tokens of all: as large as in one expert here.
MIXTRAL: dict[str, Any] = LLAMA | {
    "num_moe_experts": 2,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 14336,
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_load_balancing_type": "none",
}
MODELS = {"Llama-3 8B": (LLAMA, 128256), "Mixtral 8x7B": (MIXTRAL, 32000)}

COSTS = "f=10,i=12,w=8,comm=1,d2h=8,h2d=8"
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "v-half": {"schedule": "v-half"},
    "zb-v, offload half": {"schedule": "zb-v", "activation_offload": "half", "costs": COSTS},
    "zb-v, R": {"schedule": "zb-v", "recompute": "first:4"},
}


@dataclass(frozen=True)
class Event:
    """``alloc`` or ``free`` of a storage."""

    what: str
    storage: int = -1
    size: int = 0


@dataclass
class Allocations(TorchDispatchMode):
    """Notes when storages of the meta device begin, end and change their size."""

    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        outputs = operation(*args, **(kwargs or {}))
        for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(output, Tensor) and output.device.type == "meta":
                storage = output.untyped_storage()
                if storage._cdata not in given:  # else a view, or an operation in place
                    self._note(storage)
        return outputs

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata in self._known:
            self._set_size(self._known[storage._cdata][1], size)

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """Note that ``storage`` is on the host."""
        key = storage._cdata
        self._known[key] = weakref.ref(storage, lambda ended: self._known.pop(key)), -1

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            number = len(self._sizes)
            self._sizes[number] = 0
            self._known[key] = weakref.ref(storage, lambda ended: self._end(key, number)), number
            self._set_size(number, storage.nbytes())

    def _end(self, key: int, number: int) -> None:
        del self._known[key]
        self._set_size(number, 0)

    def _set_size(self, number: int, size: int) -> None:
        if self._sizes[number]:
            self.events.append(Event("free", number))
        if size:
            self.events.append(Event("alloc", number, size))
        self._sizes[number] = size


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length, batch, heads, _ = query.shape
        output = torch.empty_like(query)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class FlashAttention(nn.Module):
    """Stand-in for fused attention: the scores, which local attention saves, are not made."""

    def __init__(self, *unused: Any, **more: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **more: Any
    ) -> Tensor:
        return _FlashAttention.apply(query, key, value).flatten(2)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class Norm(nn.Module):
    """Stand-in for a fused norm, which saves its input and a figure for each token."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **more: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return _Norm.apply(x, self.weight)


def build(dimensions: dict[str, Any], vocabulary: int) -> list[nn.Module]:
    """Return this rank's chunks."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    config = TransformerConfig(
        pipeline_model_parallel_size=RANKS,
        virtual_pipeline_model_parallel_size=chunks,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        transformer_impl="local",
        **dimensions,
    )
    layer = get_gpt_layer_local_spec(
        dimensions.get("num_moe_experts"), moe_grouped_gemm=False, normalization="RMSNorm"
    )
    layer.submodules.self_attention.submodules.core_attention = FlashAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm

    def chunk(number: int | None) -> nn.Module:
        ends: dict[str, Any] = {"ignore_virtual": False, "vp_stage": number}
        model = GPTModel(
            config,
            layer,
            vocab_size=vocabulary,
            max_sequence_length=SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=number,
        ).to(torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        return model

    return [chunk(None if chunks is None else number) for number in range(chunks or 1)]


def _forward_step(data: Any, model: Any) -> tuple[Tensor, Any]:
    tokens = next(data)
    output = model(tokens, torch.empty_like(tokens), None, labels=tokens)
    return output, lambda output: (output.mean(), {})


class _Copies(DirectCopies):
    """Copies to a host which needs no memory."""

    def __init__(self, noted: Allocations) -> None:
        self._noted = noted

    def start(self, action: Any, pieces: Any, after: Any) -> Any:
        return Done()

    def host_buffer(self, size: int) -> Tensor:
        with _disable_current_modes():
            buffer = torch.empty(size, dtype=torch.uint8, device="meta")
            self._noted.ignore(buffer.untyped_storage())
        return buffer


def run_rank(rank: int, model: str, row: str, folder: str) -> None:
    """Run steps of ``row``, and leave what was allocated in ``folder``."""
    sys.stdout = sys.stderr = open(f"{folder}/{rank}.log", "w")  # noqa: SIM115  # to its end
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    dimensions, vocabulary = MODELS[model]
    settings = SCHEDULES[row]
    is_v = settings["schedule"] in ("zb-v", "v-half")
    noted = Allocations()
    cpu: Any = importlib.import_module("megatron_ext.patches.cpu")
    torch.utils._device._device_constructors()  # remembered, before these are wrapped
    with (
        apply(cpu.patches()),
        megatron_ext.install(**settings),
        _on_meta(noted),
        torch.device("meta"),
    ):
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=RANKS,
            virtual_pipeline_model_parallel_size=2 if is_v else None,
        )
        with torch.device("cpu"):
            model_parallel_cuda_manual_seed(0)
        chunks = build(dimensions, vocabulary)
        tokens = [torch.empty(1, SEQUENCE, dtype=torch.long) for _ in range(MICROBATCHES)]
        run = schedules.get_forward_backward_func()
        with noted:
            for _ in range(STEPS):
                run(
                    forward_step_func=_forward_step,
                    data_iterator=[iter(tokens) for _ in chunks],
                    model=chunks,
                    num_microbatches=MICROBATCHES,
                    seq_length=SEQUENCE,
                    micro_batch_size=1,
                    forward_only=False,
                )
    Path(folder, str(rank)).write_bytes(pickle.dumps(noted.events))


@contextlib.contextmanager
def _on_meta(noted: Allocations) -> Iterator[None]:
    """Context in which the device's tensors are on meta, and messages and copies are replaced."""
    resize = torch.UntypedStorage.resize_

    def noted_resize(storage: torch.UntypedStorage, size: int) -> Any:
        noted.resize(storage, int(size))
        return resize(storage, size)

    with (
        mock.patch.object(torch.cuda, "current_device", lambda: "meta"),
        mock.patch.object(torch.UntypedStorage, "resize_", noted_resize),
        mock.patch.object(Tensor, "tolist", _even),
        mock.patch.object(
            channels, "make_device_groups", lambda pipeline, ends, *unused: dict(ends)
        ),
        mock.patch.object(Channels, "send", lambda *unused: Done()),
        mock.patch.object(Channels, "receive", lambda *unused: Done()),
        mock.patch.object(offload, "copies_on", lambda device: _Copies(noted)),
        mock.patch.object(buffers, "whole_pages", _Copies(noted).host_buffer),
        mock.patch.object(buffers, "available_bytes", lambda: 2**60),
        mock.patch.object(memory, "available_bytes", lambda: 2**60),
    ):
        yield


def _even(tokens_per_expert: Tensor) -> list[int]:
    """Replacement of `Tensor.tolist` for unknown numbers: all experts have the same number of
    tokens."""
    experts = len(tokens_per_expert)
    return experts * [SEQUENCE * MIXTRAL["moe_router_topk"] // experts]


def allocations(model: str, row: str) -> list[list[Event]]:
    """Return the allocations of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.start_processes(
                run_rank, (model, row, folder), nprocs=RANKS, start_method="fork"
            )
        except Exception:
            for log in sorted(Path(folder).glob("*.log")):
                sys.stderr.write(log.read_text()[-3000:])
            raise
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(RANKS)]


def replay(events: Sequence[Event], *, expandable_segments: bool = False) -> CachingAllocator:
    """Return the allocator after ``events``."""
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    for event in events:
        if event.what == "alloc":
            allocator.allocate(event.storage, event.size)
        else:
            allocator.free(event.storage)
    return allocator


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help="parts of rows' names")
    rows = parser.parse_args(arguments).rows
    print("| model | schedule | allocated, GB | reserved, GB | more | with expandable segments |")
    print("|-|-|-|-|-|-|")
    for model in MODELS:
        for row in SCHEDULES:
            if rows and not any(part in f"{model}, {row}" for part in rows):
                continue
            ranks = allocations(model, row)
            plain, expandable = (
                [replay(events, expandable_segments=has) for events in ranks]
                for has in (False, True)
            )
            allocated = max(rank.max_requested for rank in plain)
            reserved = max(rank.max_reserved for rank in plain)
            reserved_expandable = max(rank.max_reserved for rank in expandable)
            print(
                f"| {model} | {row} | {allocated / 1e9:.1f} | {reserved / 1e9:.1f} "
                f"| {reserved / allocated - 1:.1%} | {reserved_expandable / allocated - 1:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
