"""Tests of Transformer Engine's tensor-parallel layers under sequence parallelism and a split
backward pass.

Between I and W a layer stores only this rank's part of its gathered input, and W repeats the
gather. The whole input used to be most of the bytes stored from I to W. Layers with operands in
Userbuffers have whole backward passes, and the others split ones. Layers with Userbuffers used to
be refused: if such a layer deferred its weight gradient, W would read data of the next layer with
the same buffer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.patches.transformer_engine.pytorch.module import _common
from megatron_ext.runtime.weight_gradients import queue
from tests.helpers import transformer_engine_on_cpu as on_cpu
from tests.helpers import userbuffers_on_cpu
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.ranks import run_ranks, values

*_, NEWEST = on_cpu.VERSIONS
TP, ROWS, HIDDEN, WIDE = 2, 4, 8, 12
BLOCKS, MICROBATCHES = 2, 4
OVERLAPPED: dict[str, dict[str, bool]] = {
    "none": {},
    "bulk": {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True},  # Megatron's default overlap
    "reduce-scatter": {"ub_overlap_rs_dgrad": True},  # flag --tp-comm-overlap-rs-dgrad
}


def blocks(te: Any, way: str) -> torch.nn.Sequential:
    """Return MLPs with Userbuffers, each followed by a layer without them."""
    common = {"device": "cpu", "params_dtype": torch.float32, "bias": False}
    parallel = common | {"tp_group": dist.group.WORLD, "tp_size": TP, "sequence_parallel": True}
    made = []
    for _ in range(BLOCKS):
        column: dict[str, Any] = {"parallel_mode": "column"}
        row: dict[str, Any] = {"parallel_mode": "row"}
        if OVERLAPPED[way]:
            column |= {"ub_overlap_ag": True, "ub_name": "fc1", **OVERLAPPED[way]}
            row |= {"ub_overlap_ag": True, "ub_overlap_rs": True, "ub_name": "fc2"}
        made += [
            te.LayerNormLinear(HIDDEN, WIDE, **parallel, **column),
            te.Linear(WIDE, HIDDEN, **parallel, **row),
            te.Linear(HIDDEN, HIDDEN, **common),
        ]
    return torch.nn.Sequential(*made)


def compared(rank: int, version: str, way: str) -> tuple[list[str], set[str]]:
    """Return the names of tensors that differ from stock's, and of weights whose gradients waited
    for W."""
    te = on_cpu.load(on_cpu.fetch(version))
    apply([patch for patch in cpu.patches() if patch.target.startswith("torch")])
    parallel_state.initialize_model_parallel(TP)
    userbuffers_on_cpu.initialize(TP * ROWS, {"fc1": HIDDEN, "fc2": HIDDEN})
    torch.manual_seed(rank)
    stock, ours = blocks(te, way), blocks(te, way)
    ours.load_state_dict(stock.state_dict())
    inputs = [torch.randn(ROWS, HIDDEN) for _ in range(MICROBATCHES)]
    expected = [_gradient(stock, x) for x in inputs]
    apply(_common.patches(PipelineConfig(schedule="zb-h1")))
    queue.splitting = True
    queue.weights = set()
    for microbatch, x in enumerate(inputs):
        x.grad = None
        w_is_next = microbatch > 1
        with queue.collecting(0, microbatch, w_is_next=w_is_next):
            dx = _gradient(ours, x)
        largest = max(tensor.numel() for tensor in queue.tensors(0, microbatch))
        expected_largest = TP * ROWS * HIDDEN if w_is_next else ROWS * WIDE
        if way == "none" and largest != expected_largest:
            return [f"{largest} elements wait for W"], set()
        if not torch.equal(dx, expected[microbatch]):
            return [f"input {microbatch}"], set()
        queue.run(0, microbatch)
    put_off = {name for name, weight in ours.named_parameters() if weight in queue.weights}
    pairs = zip(stock.named_parameters(), ours.parameters(), strict=True)
    different = [
        name
        for (name, a), b in pairs
        if b.grad is None or not torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    ]
    return different, put_off


def _gradient(model: torch.nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.covers("B", ("line", "loop", "v"), tp_comm_overlap=True, sequence_parallel=True)
@pytest.mark.parametrize(
    ("version", "way"),
    [
        (version, way)
        for version in on_cpu.VERSIONS
        for way in OVERLAPPED
        if IS_NIGHT or (version == NEWEST and way != "reduce-scatter")
    ],
)
def test_what_waits_for_w(version: str, way: str) -> None:
    on_cpu.fetch(version)  # fetched here, because only the test itself can be skipped
    run = partial(compared, version=version, way=way)
    for different, put_off in values(run_ranks(TP, run)):
        assert not different
        # Numbers of the layers in each block whose weight gradients wait for W.
        kinds = {"none": (0, 1, 2), "bulk": (2,), "reduce-scatter": (0, 2)}[way]
        numbers = [3 * block + kind for block in range(BLOCKS) for kind in kinds]
        assert put_off == {f"{number}.weight" for number in numbers}
