"""Tests of Transformer Engine's own layers with a split backward pass, in several versions, with
torch's GEMMs.

A process can load one version only, so all cases of a version run in one forked process, and each
test reads how its case ended there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.config import PipelineConfig
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.core.distributed import distributed_data_parallel
from megatron_ext.patches.transformer_engine.pytorch.module import _common
from megatron_ext.runtime.weight_gradients import queue
from tests.helpers import transformer_engine_on_cpu as on_cpu
from tests.helpers.held_bytes import LiveStorages
from tests.helpers.ranks import run_ranks, values

ROWS, WIDTH, WIDER = 6, 8, 12
MICROBATCHES = 3
ALIKE = (ROWS,) * MICROBATCHES  # rows of each microbatch
BF16 = {"device": "cpu", "params_dtype": torch.bfloat16}

Te = Any  # the module transformer_engine.pytorch
Layer = Callable[..., torch.nn.Module]

LAYERS: dict[str, Layer] = {
    "Linear": lambda te, **options: te.Linear(WIDTH, WIDER, **BF16, **options),
    "LayerNormLinear": lambda te, **options: te.LayerNormLinear(WIDTH, WIDER, **BF16, **options),
    "RMSNormLinear": lambda te, **options: te.LayerNormLinear(
        WIDTH, WIDER, normalization="RMSNorm", **BF16, **options
    ),
    "LayerNormMLP": lambda te, **options: te.LayerNormMLP(WIDTH, WIDER, **BF16, **options),
    "ReluMLP": lambda te, **options: te.LayerNormMLP(
        WIDTH, WIDER, activation="relu", **BF16, **options
    ),
    "GroupedLinear": lambda te, **options: te.GroupedLinear(2, WIDTH, WIDER, **BF16, **options),
}

HOW = ("grad", "main_grad", "fused")  # where weight gradients are added up

CASES: dict[str, Callable[[Te], None]] = {}


def case(function: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    """Register ``function(te, *arguments)`` as a case that runs in each version."""
    name = "-".join([function.__name__, *map(str, arguments)])
    CASES[name] = lambda te: function(te, *arguments)
    return function


def case_for(*rows: tuple[Any, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def register(function: Callable[..., None]) -> Callable[..., None]:
        for row in rows:
            case(function, *row)
        return function

    return register


@functools.cache
def outcomes(version: str) -> dict[str, str]:
    """Return how each case ended under ``version``, by its name: an empty text, or the
    traceback."""
    folder = on_cpu.fetch(version)

    def run(rank: int) -> dict[str, str]:
        te = on_cpu.load(folder)
        apply([patch for patch in cpu.patches() if patch.target.startswith("torch")])
        parallel_state.initialize_model_parallel()
        return {name: outcome(te, run) for name, run in CASES.items()}

    (texts,) = values(run_ranks(1, run))
    return texts


def outcome(te: Te, run: Callable[[Te], None]) -> str:
    try:
        run(te)
    except BaseException:
        return traceback.format_exc()
    finally:
        queue.clear()
    return ""


@pytest.fixture(scope="module", params=on_cpu.VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return request.param


class Split:
    """Context in which our patches are applied and the queue splits backward passes."""

    def __enter__(self) -> None:
        config = PipelineConfig(schedule="zb-h1")
        self._handle = apply([*_common.patches(config), *distributed_data_parallel.patches(config)])
        queue.splitting = True

    def __exit__(self, *exception: object) -> None:
        queue.splitting = False
        self._handle.undo()


def inputs(rows: Sequence[int] = ALIKE) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield x and dy for each microbatch, the same at each call."""
    generator = torch.Generator().manual_seed(1)
    for count in rows:
        x = torch.randn(count, WIDTH, generator=generator).bfloat16().requires_grad_()
        yield x, torch.randn(count, WIDER, generator=generator).bfloat16()


def forward(layer: torch.nn.Module, x: Tensor) -> Tensor:
    splits = ([ROWS - 2, 2],) if hasattr(layer, "num_gemms") else ()
    y = layer(x, *splits)
    return y[0] if isinstance(y, tuple) else y


def backward(y: Tensor, dy: Tensor) -> None:
    y.backward(dy[:, : y.shape[-1]])


def same_layers(te: Te, name: str, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return two layers with the same parameters."""
    torch.manual_seed(0)
    first = LAYERS[name](te, **options)
    second = LAYERS[name](te, **options)
    second.load_state_dict(first.state_dict())
    return first, second


def with_main_grad(layer: torch.nn.Module) -> torch.nn.Module:
    """Prepare a layer as a data-parallel wrapper does, which adds up gradients in fp32."""
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(functools.partial(move_to_main_grad, parameter))
        parameter.node = node  # type: ignore[attr-defined]  # it must live
    return layer


def move_to_main_grad(parameter: Any, *unused: Any) -> None:
    if parameter.grad is not None and not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def gradients(layer: torch.nn.Module) -> dict[str, Tensor | None]:
    return {
        name: getattr(parameter, "main_grad", parameter.grad)
        for name, parameter in layer.named_parameters()
    }


def assert_same(ours: dict[str, Tensor | None], stock: dict[str, Tensor | None]) -> None:
    assert ours.keys() == stock.keys()
    for name, expected in stock.items():
        gradient = ours[name]
        if expected is None or gradient is None:
            assert gradient is expected, f"{name} has {gradient}, expected {expected}"
        else:
            assert expected.count_nonzero(), f"nothing is tested: {name} has no gradient"
            assert torch.equal(gradient, expected), f"{name} differs"


def whole(layer: torch.nn.Module, rows: Sequence[int] = ALIKE) -> list[Tensor]:
    """Run microbatches forward and backward in turn, as 1F1B does, and return the gradients of the
    inputs."""
    made = []
    for x, dy in inputs(rows):
        backward(forward(layer, x), dy)
        assert x.grad is not None
        made.append(x.grad)
    return made


def split(layer: torch.nn.Module, rows: Sequence[int] = ALIKE) -> list[Tensor]:
    """Run the microbatches under a schedule that splits, with each W after the next microbatch's I,
    and return the gradients of the inputs."""
    pairs = list(inputs(rows))
    outputs = [forward(layer, x) for x, _ in pairs]
    for microbatch, (_, dy) in enumerate(pairs):
        with queue.collecting(0, microbatch):
            backward(outputs[microbatch], dy)
        if microbatch:
            queue.run(0, microbatch - 1)
    queue.run(0, MICROBATCHES - 1)
    assert not len(queue)
    return [x.grad for x, _ in pairs if x.grad is not None]


@case_for(*[(name, how) for name in LAYERS for how in HOW])
def gradients_are_stocks(te: Te, name: str, how: str) -> None:
    stock, ours = same_layers(te, name, fuse_wgrad_accumulation=how == "fused")
    if how != "grad":
        with_main_grad(stock)
        with_main_grad(ours)
    expected = whole(stock)
    with Split():
        input_gradients = split(ours)
    assert all(map(torch.equal, input_gradients, expected))
    assert_same(gradients(ours), gradients(stock))


@case_for(*[(name, how) for name in ("Linear", "GroupedLinear") for how in HOW])
def experts_may_get_no_tokens(te: Te, name: str, how: str) -> None:
    """Split layers of experts have stock's gradients if a rank's experts get no tokens. A
    GroupedLinear has several experts, a Linear is one."""
    tokens = ([ROWS, 0], [0, 0], [1, ROWS - 1])
    rows = [sum(counts) for counts in tokens]
    stock, ours = same_layers(te, name, fuse_wgrad_accumulation=how == "fused")
    if how != "grad":
        with_main_grad(stock)
        with_main_grad(ours)
    if name == "GroupedLinear":
        for layer in (stock, ours):
            plain, splits = layer.forward, iter(tokens)
            layer.forward = lambda x, *unused, plain=plain, splits=splits: plain(x, next(splits))
    expected = whole(stock, rows)
    with Split():
        input_gradients = split(ours, rows)
    assert all(map(torch.equal, input_gradients, expected))
    assert_same(gradients(ours), gradients(stock))


@case_for(*[(name,) for name in LAYERS])
def the_first_microbatch_overwrites(te: Te, name: str) -> None:
    """The first weight gradient of a step overwrites main_grad in a split layer, as with stock."""
    stock, ours = map(with_main_grad, same_layers(te, name, fuse_wgrad_accumulation=True))
    for layer in (stock, ours):
        plain = layer.forward
        firsts = iter([True] + [False] * (MICROBATCHES - 1))
        layer.forward = lambda *arguments, plain=plain, firsts=firsts: plain(
            *arguments, is_first_microbatch=next(firsts)
        )
        for parameter in layer.parameters():
            parameter.main_grad.fill_(1000)  # type: ignore[attr-defined]
    whole(stock)
    with Split():
        split(ours)
    assert_same(gradients(ours), gradients(stock))


@case_for(*[(name,) for name in LAYERS])
def weights_may_be_of_another_type(te: Te, name: str) -> None:
    """A split layer under autocast has stock's gradients: the GEMMs produce bf16, and the weights
    and their gradients are fp32."""
    stock, ours = same_layers(te, name)
    for layer in (stock, ours):
        layer.float()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast("cuda", torch.bfloat16))
            if layer is ours:
                stack.enter_context(Split())
                split(ours)
            else:
                whole(stock)
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())  # type: ignore[union-attr]
    assert_same(gradients(ours), gradients(stock))


@case_for(("Linear",), ("GroupedLinear",), ("LayerNormMLP",))
def a_bias_may_be_frozen(te: Te, name: str) -> None:
    """A split layer with a frozen bias has stock's gradients. The GEMM of W computes the bias's
    gradient together with the weight's in any case."""
    stock, ours = same_layers(te, name)
    for layer in (stock, ours):
        for key, parameter in layer.named_parameters():
            parameter.requires_grad_("bias" not in key)
    whole(stock)
    with Split():
        split(ours)
    assert_same(gradients(ours), gradients(stock))


@case_for(("Linear",), ("GroupedLinear",), ("LayerNormMLP",))
def a_bias_may_have_hooks(te: Te, name: str) -> None:
    """Hooks on a bias run in a split layer as in stock. W used to add the gradient of a bias
    without calling its hooks, because only hooks on weights were looked for."""
    stock, ours = same_layers(te, name)
    calls = {stock: 0, ours: 0}

    def double(layer: torch.nn.Module, gradient: Tensor) -> Tensor:
        calls[layer] += 1
        return gradient * 2

    for layer in calls:
        bias = next(parameter for key, parameter in layer.named_parameters() if "bias" in key)
        bias.register_hook(functools.partial(double, layer))
    whole(stock)
    with Split():
        split(ours)
    assert calls == {stock: MICROBATCHES, ours: MICROBATCHES}
    assert_same(gradients(ours), gradients(stock))


@case_for(*[(name,) for name in LAYERS])
def gradients_wait_for_w(te: Te, name: str) -> None:
    """After I no weight of a split layer has a gradient, nor has a bias whose gradient W's GEMM
    computes."""
    layer = LAYERS[name](te)
    (x, dy), *_ = inputs()
    with Split():
        y = forward(layer, x)
        with queue.collecting(0, 0):
            backward(y, dy)
        early = {key for key, gradient in gradients(layer).items() if gradient is not None}
        assert not {key for key in early if "weight" in key and "norm" not in key}
        queue.run(0, 0)
    assert None not in gradients(layer).values()


@case_for(*[(name, how) for name in LAYERS for how in ("main_grad", "fused")])
def only_inputs_and_gradients_are_held(te: Te, name: str, how: str) -> None:
    """After I a split linear layer stores its input and its output's gradient, and after W
    nothing."""
    layer = with_main_grad(LAYERS[name](te, fuse_wgrad_accumulation=how == "fused"))
    with Split():
        split(layer)  # a first run fills caches
        x, dy = next(inputs())
        whole_dy = dy[:, : forward(layer, x).shape[-1]].contiguous()
        with LiveStorages() as live:
            x = x.detach().clone().requires_grad_()
            dy = whole_dy.clone()
            y = forward(layer, x)
            with queue.collecting(0, 0):
                y.backward(dy)
            del x, y, dy
            gc.collect()
            assert sorted(live.sizes().values()) == held_after_i(name)
            queue.run(0, 0)
            assert not live.sizes()


def held_after_i(name: str) -> list[int]:
    x, dy = 2 * ROWS * WIDTH, 2 * ROWS * WIDER
    return sorted([x, dy, dy, x] if "MLP" in name else [x, dy])


@case_for(*[(name,) for name in LAYERS])
def hooks_fire_once(te: Te, name: str) -> None:
    """W puts the weight gradient into ``.grad`` and then calls the module's hooks, once for each
    microbatch, as Transformer Engine's ``backward_dw`` does."""
    stock, ours = same_layers(te, name)
    whole(stock)
    expected = gradients(stock)
    weights = [key for key in expected if "weight" in key and "norm" not in key]
    moved: dict[str, list[Tensor]] = {key: [] for key in weights}

    def take() -> None:
        for key in weights:
            parameter = ours.get_parameter(key)
            assert parameter.grad is not None
            moved[key].append(parameter.grad)
            parameter.grad = None

    ours.register_wgrad_accumulation_and_reduce_hooks(take)  # type: ignore[operator]
    with Split():
        split(ours)
    for key, parts in moved.items():
        assert len(parts) == MICROBATCHES
        total = functools.reduce(torch.Tensor.add, parts)
        assert torch.equal(total, expected[key])  # type: ignore[arg-type]


@case_for(*[(name,) for name in LAYERS])
def hooks_fire_once_for_all_uses(te: Te, name: str) -> None:
    """A module's hooks run once for a layer that a microbatch passes twice, as multi-token
    prediction's repeated layer. The hooks used to run after each use, and took the gradient of the
    first use without that of the second."""
    stock, ours = same_layers(te, name)
    weights = [key for key, _ in ours.named_parameters() if "weight" in key and "norm" not in key]
    moved: dict[str, list[Tensor]] = {key: [] for key in weights}

    def take() -> None:
        for key in weights:
            parameter = ours.get_parameter(key)
            assert parameter.grad is not None
            moved[key].append(parameter.grad)
            parameter.grad = None

    ours.register_wgrad_accumulation_and_reduce_hooks(take)  # type: ignore[operator]
    twice_through(stock)
    with Split():
        with queue.collecting(0, 0):
            twice_through(ours)
        queue.run(0, 0)
    for key, expected in gradients(stock).items():
        if key in moved:
            (summed,) = moved[key]
            assert torch.equal(summed, expected)  # type: ignore[arg-type]


def twice_through(layer: torch.nn.Module) -> None:
    (x, dy), (other, _), *_ = inputs()
    backward(forward(layer, x) + forward(layer, other), dy)


@case_for(("Linear",), ("LayerNormLinear",), ("GroupedLinear",))
def a_frozen_weight_has_no_w(te: Te, name: str) -> None:
    stock, ours = same_layers(te, name)
    for layer in (stock, ours):
        for key, parameter in layer.named_parameters():
            parameter.requires_grad_("norm" in key)
    expected = whole(stock)
    with Split():
        pairs = list(inputs())
        for microbatch, (x, dy) in enumerate(pairs):
            y = forward(ours, x)
            with queue.collecting(0, microbatch):
                backward(y, dy)
            assert not queue._pending[0, microbatch]
            queue.run(0, microbatch)
    assert all(torch.equal(x.grad, e) for (x, _), e in zip(pairs, expected, strict=True))  # type: ignore[arg-type]
    assert_same(gradients(ours), gradients(stock))


@case_for(("LayerNormMLP", "fc1_"), ("LayerNormMLP", "fc2_"))
def half_of_an_mlp_may_be_frozen(te: Te, name: str, prefix: str) -> None:
    """An MLP with one frozen linear layer has stock's gradients, and its hooks run. The two layers
    share a store of deferred gradients; if one was frozen, the hooks used to run only after the
    gradient of fc1."""
    stock, ours = same_layers(te, name)
    for layer in (stock, ours):
        layer.get_parameter(f"{prefix}weight").requires_grad_(False)
        layer.get_parameter(f"{prefix}bias").requires_grad_(False)
    fired: list[None] = []
    ours.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(None))  # type: ignore[operator]
    whole(stock)
    with Split():
        split(ours)
    assert_same(gradients(ours), gradients(stock))
    assert len(fired) == MICROBATCHES


@case_for(("Linear",), ("LayerNormLinear",))
def an_input_may_need_no_gradient(te: Te, name: str) -> None:
    """A split layer whose input requires no gradient, the first of a stage without embeddings,
    still gets its weight gradient in W."""
    stock, ours = same_layers(te, name)
    for layer, splits in ((stock, False), (ours, True)):
        x, dy = next(inputs())
        x = x.detach()
        if not splits:
            backward(forward(layer, x), dy)
            continue
        with Split():
            y = forward(layer, x)
            with queue.collecting(0, 0):
                backward(y, dy)
            queue.run(0, 0)
    assert_same(gradients(ours), gradients(stock))


@case_for(("Linear",), ("LayerNormLinear",), ("LayerNormMLP",))
def a_layer_may_be_used_twice(te: Te, name: str) -> None:
    """A split layer that is used twice has stock's gradient: autograd sums the two contributions in
    bf16 before they are added to main_grad in fp32."""
    stock, ours = map(with_main_grad, same_layers(te, name))
    for layer in (stock, ours):
        (x, dy), (other_x, other_dy), *_ = inputs()

        def both(layer: torch.nn.Module = layer, a: Any = (x, dy), b: Any = (other_x, other_dy)):
            y, other = forward(layer, a[0]), forward(layer, b[0])
            return (y * a[1][:, : y.shape[-1]]).sum() + (other * b[1][:, : y.shape[-1]]).sum()

        if layer is stock:
            both().backward()
            continue
        with Split():
            loss = both()
            with queue.collecting(0, 0):
                loss.backward()
            queue.run(0, 0)
    assert_same(gradients(ours), gradients(stock))


@case_for(
    *[
        (name, overlap, fused)
        for name in ("LayerNormLinear", "GroupedLinear", "LayerNormMLP")
        for overlap in (False, True)
        for fused in (False, True)
    ]
)
def megatrons_data_parallel_wrapper_is_content(
    te: Te, name: str, overlap: bool, fused: bool
) -> None:
    """Split layers train in Megatron's data-parallel wrapper. With overlapped reductions its hooks
    require a gradient in I, where a split layer has none."""
    stock, ours = same_layers(te, name, fuse_wgrad_accumulation=fused)
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, average_in_collective=False
    )
    wrapped = DistributedDataParallel(config, settings, stock)
    pairs = list(inputs())
    for number, (x, dy) in enumerate(pairs):
        if number < len(pairs) - 1:
            with wrapped.no_sync():
                backward(forward(stock, x), dy)
        else:
            backward(forward(stock, x), dy)
    wrapped.finish_grad_sync()
    with Split():
        wrapped = DistributedDataParallel(config, settings, ours)
        with wrapped.no_sync():
            split(ours)
        if overlap:
            wrapped.start_grad_sync()
        wrapped.finish_grad_sync()
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert_same(gradients(ours), gradients(stock))


@case_for(("Linear",), ("LayerNormLinear",))
def an_output_layers_gradient_may_come_with_i(te: Te, name: str) -> None:
    """The output layer's weight gradient is computed in I if W would store the gradient of the
    logits for long. (MXFP8's output layer is a Linear.) The gradient used to wait for W in any
    case."""
    stock, ours = same_layers(te, name)
    whole(stock)
    with Split():
        queue.at_once = frozenset([ours.weight])  # type: ignore[list-item]
        for microbatch, (x, dy) in enumerate(inputs()):
            y = forward(ours, x)
            with queue.collecting(0, microbatch):
                backward(y, dy)
            assert not queue._pending[0, microbatch]
            queue.run(0, microbatch)
    assert_same(gradients(ours), gradients(stock))


@case_for(("Linear",), ("GroupedLinear",))
def its_own_delay_stays_as_it_is(te: Te, name: str) -> None:
    """Our patches leave Transformer Engine's own deferral (delay_wgrad_compute) to code that uses
    it outside our schedules."""
    stock, ours = same_layers(te, name, delay_wgrad_compute=True)
    for layer in (stock, ours):
        x, dy = next(inputs())
        if layer is stock:
            backward(forward(layer, x), dy)
            layer.backward_dw()  # type: ignore[operator]
            continue
        with Split():
            queue.splitting = False
            backward(forward(layer, x), dy)
            layer.backward_dw()  # type: ignore[operator]
    assert_same(gradients(ours), gradients(stock))


@case_for(())
def debug_mode_is_refused(te: Te) -> None:
    from transformer_engine.debug.pytorch.debug_state import TEDebugState

    layer = LAYERS["Linear"](te)
    TEDebugState.debug_enabled = True
    try:
        with Split(), pytest.raises(ValueError, match=r"debug mode.* such as 1f1b or gpipe"):
            layer.wgrad_store.delay_wgrad_compute()  # type: ignore[operator,union-attr]
    finally:
        TEDebugState.debug_enabled = False


@case_for(())
def a_weight_in_parts_is_refused(te: Te) -> None:
    layer = te.Linear(WIDTH, WIDER, parameters_split={"q_": 8, "k_": 4}, **BF16)
    x, dy = next(inputs())
    with Split():
        y = forward(layer, x)
        with (
            pytest.raises(ValueError, match=r"Linear has no weight, .*such as 1f1b or gpipe"),
            queue.collecting(0, 0),
        ):
            backward(y, dy)


@case_for(())
def a_layer_of_another_kind_is_refused(te: Te) -> None:
    from transformer_engine.pytorch.module._common import WeightGradStore

    store = WeightGradStore()
    with (
        Split(),
        pytest.raises(ValueError, match=r"layer other than Linear.*such as 1f1b or gpipe"),
    ):
        store.put([], lambda: None)


@pytest.mark.parametrize("name", CASES)
def test_with(version: str, name: str) -> None:
    error = outcomes(version)[name]
    assert not error, f"Transformer Engine {version}:\n{error}"
