"""Tests of tensor-parallel communication in a split backward pass: it overlaps with products, in
one order on all ranks.

A whole backward pass gathers a layer's input during one matrix product, and reduces the gradient of
its input during the other product. In a split backward pass no product used to hide the gather or
the reduction.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

from megatron_ext.patches.megatron.core.tensor_parallel import layers as ours
from megatron_ext.runtime.weight_gradients import WeightGradients, queue
from tests.helpers.ranks import run_ranks, values

FUNCTION = layers.LinearWithGradAccumulationAndAsyncCommunication
NEWER = (1, None)[: len(inspect.signature(FUNCTION.forward).parameters) - 10]
LAYERS, MICROBATCHES = 3, 4
HIDDEN, WIDE = 8, 12


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


def test_in_w_one_gather_runs_during_each_product() -> None:
    """In W each gather of a layer's input runs during a product: it starts before the product of
    the column-parallel layer (c) that W computes before that layer, and the first gather starts
    before the first product. Row-parallel layers (r) gather nothing."""
    events: list[str] = []
    waiting = WeightGradients()
    with waiting.collecting(0, 0):
        for name in ("r2", "c2", "r1", "c1", "c0"):
            gather = partial(events.append, f"gather {name}") if name[0] == "c" else None
            waiting.put(weight(), partial(events.append, name), (), gather)
    waiting.run(0, 0)
    assert events == ["gather c2", "r2", "gather c1", "c2", "r1", "gather c0", "c1", "c0"]


def test_a_first_gather_has_nothing_to_hide_behind_and_the_next_has() -> None:
    events: list[str] = []
    waiting = WeightGradients()
    with waiting.collecting(0, 0):
        for name in ("c1", "c0", "r"):
            gather = partial(events.append, f"gather {name}") if name[0] == "c" else None
            waiting.put(weight(), partial(events.append, name), (), gather)
    waiting.run(0, 0)
    assert events == ["gather c1", "gather c0", "c1", "c0", "r"]


def test_what_is_computed_in_i_while_a_reduction_is_under_way() -> None:
    """While a layer's reduction runs in I, the weight gradient of the layer before it in the
    backward pass is computed, if W is the next pass. This is done only for weights whose gradient
    needs no gather, and that the first W of the step has shown to be used once."""
    events: list[str] = []
    waiting = WeightGradients()
    once, twice, gathered = weight(), weight(), weight()

    def contribution(name: str) -> None:
        events.append(name)

    def i(microbatch: int, *, w_is_next: bool) -> None:
        with waiting.collecting(0, microbatch, w_is_next=w_is_next):
            for put in (twice, twice, once, gathered):
                gather = partial(events.append, "gather") if put is gathered else None
                name = {id(once): "once", id(twice): "twice"}.get(id(put), "gathered")
                waiting.put(put, partial(contribution, f"{name}{microbatch}"), (), gather)
                events.append(f"reduction{microbatch}")
                waiting.compute_meanwhile()

    i(0, w_is_next=True)
    assert events == ["reduction0"] * 4, "nothing is known of the weights yet"
    waiting.run(0, 0)
    events.clear()
    i(1, w_is_next=False)
    assert events == ["reduction1"] * 4
    waiting.run(0, 1)
    events.clear()
    i(2, w_is_next=True)
    assert events == ["reduction2"] * 3 + ["once2", "reduction2"]
    events.clear()
    waiting.run(0, 2)
    assert events == ["gather", "twice2", "twice2", "gathered2"]
    waiting.clear()
    i(3, w_is_next=True)
    waiting.clear()
    assert events[-1] == "reduction3", "the next step begins anew"


class Recorded:
    """Record of communication and products, in the order in which a rank starts them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gathered: list[weakref.ref[Tensor]] = []
        self.most_gathered = 0

    def communication(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.events.append(f"{name} {[tuple(x.shape) for x in args if isinstance(x, Tensor)]}")
            handle = call(*args, **kwargs)
            if name == "gather" and kwargs.get("async_op"):
                self.gathered.append(weakref.ref(args[0]))
                gc.collect()
                alive = sum(reference() is not None for reference in self.gathered)
                self.most_gathered = max(self.most_gathered, alive)
            if handle is None:
                return None
            wait = handle.wait

            class Waited:
                def wait(waited: Any) -> None:
                    self.events.append(f"wait {name}")
                    wait()

            return Waited()

        return recorded

    def product(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def recorded(gradient: Any) -> Any:
            self.events.append("product")
            return call(gradient)

        return recorded


def stack(x: Tensor, weights: list[torch.nn.Parameter], group: Any, scatters: bool) -> Tensor:
    """Run blocks of a column-parallel and a row-parallel layer, as attention and MLP are."""
    apply = partial(ours.split_apply, FUNCTION.apply)
    for column, row in zip(weights[::2], weights[1::2], strict=True):
        residual = x
        y = apply(x, column, None, False, not scatters, scatters, None, None, group, *NEWER)
        y = apply(y.square(), row, None, False, False, False, None, None, group, *NEWER)
        if scatters:
            x = residual + mappings.reduce_scatter_to_sequence_parallel_region(y, group=group)
        else:
            x = residual + mappings.reduce_from_tensor_model_parallel_region(y, group=group)
    return x


def trained(rank: int, scatters: bool) -> tuple[bool, list[str], int]:
    parallel_state._set_global_memory_buffer()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    group = dist.group.WORLD
    recorded = Recorded()
    layers.dist_all_gather_func = recorded.communication("gather", layers.dist_all_gather_func)
    scatter = layers.dist_reduce_scatter_func
    layers.dist_reduce_scatter_func = recorded.communication("scatter", scatter)
    dist.all_reduce = recorded.communication("reduce", dist.all_reduce)
    torch.distributed.all_reduce = dist.all_reduce
    operands: Any = recorded.product(ours._WeightGradient.operands)
    ours._WeightGradient.operands = operands  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(rank)
    shapes = [(WIDE, HIDDEN), (HIDDEN, WIDE)] * LAYERS
    stocks = [torch.nn.Parameter(torch.randn(*shape, generator=generator) / 4) for shape in shapes]
    split = [torch.nn.Parameter(weight.detach().clone()) for weight in stocks]
    tokens = torch.Generator().manual_seed(rank if scatters else 0)
    inputs = [torch.randn(4, 1, HIDDEN, generator=tokens) for _ in range(MICROBATCHES)]
    gradients = []
    for x in inputs:
        x.requires_grad_()
        stack(x, stocks, group, scatters).square().sum().backward()
        gradients.append(x.grad)
    recorded.events.clear()
    recorded.gathered.clear()
    recorded.most_gathered = 0
    queue.splitting = True
    same = True
    for microbatch, x in enumerate(inputs):
        x.grad = None
        loss = stack(x, split, group, scatters).square().sum()
        recorded.events.append(f"I{microbatch}")
        with queue.collecting(0, microbatch, w_is_next=microbatch != 1):
            loss.backward()
        recorded.events.append(f"W{microbatch}")
        queue.run(0, microbatch)
        recorded.events.append("F")
        same &= torch.equal(x.grad, gradients[microbatch])  # type: ignore[arg-type]
    pairs = zip(stocks, split, strict=True)
    same &= all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    return same, recorded.events, recorded.most_gathered


@pytest.mark.covers(
    "A", ("line", "loop", "v"), tensor_model_parallel_size=2, sequence_parallel=True
)
@pytest.mark.parametrize("scatters", [True, False], ids=["sequence parallel", "tensor parallel"])
def test_the_split_backward_of_two_tensor_parallel_ranks(scatters: bool) -> None:
    """The split backward pass of two tensor-parallel ranks equals stock's bitwise. Both ranks start
    their communication in the same order, as they would deadlock otherwise."""
    results = values(run_ranks(2, partial(trained, scatters=scatters)))
    (same, events, most), (other_same, other_events, _) = results
    assert same and other_same
    assert events == other_events
    passes = dict(_passes(events))
    reduction = "scatter" if scatters else "reduce"
    # If W is the next pass, the reduction of each column-parallel layer overlaps with the weight
    # product of the row-parallel layer before, except in the first microbatch.
    assert passes["I2"].count("product") == passes["I3"].count("product") == LAYERS
    assert not passes["I0"].count("product") and not passes["I1"].count("product")
    assert f"{reduction} product wait {reduction}" in " ".join(_names(passes["I2"]))
    assert passes["W1"].count("product") == 2 * LAYERS
    assert passes["W2"].count("product") == LAYERS
    if not scatters:
        assert most == 0
        return
    assert most == 2, "more than the input in use and the next one were gathered at once"
    assert _names(passes["W1"])[:2] == ["gather", "product"], "hidden behind the first product"
    assert _names(passes["W2"])[:3] == ["gather", "gather", "product"]
    assert _names(passes["W2"]).count("gather") == LAYERS


def _passes(events: list[str]) -> list[tuple[str, list[str]]]:
    made: list[tuple[str, list[str]]] = []
    for event in events:
        if event[0] in "IWF":
            made.append((event, []))
        elif made:
            made[-1][1].append(event)
    return made


def _names(events: list[str]) -> list[str]:
    return [event.partition(" [")[0] for event in events]
