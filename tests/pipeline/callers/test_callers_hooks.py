"""Tests of callers' hooks on weights and modules, under schedules whose W passes compute the weight
gradients."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.modules import module as global_hooks

import megatron_ext
from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step import callers_hooks as of_callers
from megatron_ext.adapter.step.callers_hooks import CallersHooks, callers_hooks
from megatron_ext.adapter.step.checkpointed_forward import hooked_around_layers
from megatron_ext.adapter.step.recomputed_decoder import decoder_to_recompute
from megatron_ext.features.split_report.adapter import split_report
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.runtime.weight_gradients import queue
from tests.helpers.callers import (
    assert_same,
    forward_step,
    named_parameters,
    whole_step,
    wrapped,
)
from tests.helpers.combinations import at_night
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.callers.test_code_of_callers import (
    BATCH,
    LAYERS,
    MICROBATCHES,
    SEQUENCE,
    batches,
    build,
    pipelines_of_two,
    run_step,
    step,
)

LINEAR = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1")
Handle = Any  # a hook's handle, which has ``remove``
Hook = Callable[..., None]


def node_of(weight: Tensor) -> Any:
    """Return the autograd node that accumulates the gradients of ``weight``."""
    return weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


# By kind of hook: a function that puts the hook on a layer, and the weights whose gradients it
# sees.
KINDS: dict[str, tuple[Callable[[Any, Hook], Handle], set[str]]] = {
    "weight": (
        lambda layer, hook: layer.mlp.linear_fc1.weight.register_hook(hook),
        {"mlp.linear_fc1"},
    ),
    "accumulated": (
        lambda layer, hook: layer.mlp.linear_fc1.weight.register_post_accumulate_grad_hook(hook),
        {"mlp.linear_fc1"},
    ),
    "before the node": (
        lambda layer, hook: node_of(layer.mlp.linear_fc1.weight).register_prehook(hook),
        {"mlp.linear_fc1"},
    ),
    "behind the node": (
        lambda layer, hook: node_of(layer.mlp.linear_fc1.weight).register_hook(hook),
        {"mlp.linear_fc1"},
    ),
    "several weights": (
        lambda layer, hook: torch.autograd.graph.register_multi_grad_hook(
            [layer.get_submodule(name).weight for name in LINEAR], hook
        ),
        set(LINEAR),
    ),
    "behind a module's": (
        lambda layer, hook: layer.self_attention.register_full_backward_hook(hook),
        {"self_attention.linear_qkv", "self_attention.linear_proj"},
    ),
    "before a module's": (
        lambda layer, hook: layer.self_attention.register_full_backward_pre_hook(hook),
        {"self_attention.linear_qkv", "self_attention.linear_proj"},
    ),
}


def split_weights(chunks: list[Any], **more: Any) -> set[str]:
    """Run a step, and return the names of the layers' weights whose gradients were deferred to
    W."""
    queue.weights = set()
    run_step(chunks, **more)
    split, queue.weights = queue.weights, None
    return {
        name.removesuffix(".weight").partition("layers.")[2]
        for name, weight in chunks[0].named_parameters()
        if weight in split and "layers." in name
    }


@pytest.mark.parametrize(
    "overlap",
    [pytest.param(True, id="overlap"), *at_night(pytest.param(False, id=""))],
)
def test_no_weight_without_a_callers_hook_is_left_out_of_the_split(
    overlap: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only weights with a hook of the caller's are exempt from the split into I and W. Megatron's
    data-parallel wrapper has a hook on the autograd node of each weight; if that counted as a
    caller's hook, no backward pass would be split, without a message. A caller's hook on the same
    autograd node used not to be called."""

    def on_rank(rank: int) -> None:
        calls: list[Any] = []

        def note(*arguments: Any) -> None:
            calls.append(arguments)

        with pipelines_of_two(schedule="zb-h1"):
            chunk: Any = build()[0]
            chunks = [wrapped(chunk, overlap)]
            layer = chunk.decoder.layers[1]
            every = {
                f"{number}.{name}" for number in (0, 1) for name in (*LINEAR, "mlp.linear_fc2")
            }

            def split() -> set[str]:
                chunks[0].zero_grad_buffer()
                return split_weights(chunks)

            assert split() == every
            expected = {name: p.main_grad.clone() for name, p in chunk.named_parameters()}
            for kind, (register, concerned) in KINDS.items():
                handle = register(layer, note)
                assert split() == every - {f"1.{name}" for name in concerned}, kind
                report = split_report([chunk], (), Split(True, callers_hooks([chunk])))
                assert "linear_proj.weight (hooks of the caller's run in I)" in report or (
                    "linear_fc1.weight (hooks of the caller's run in I)" in report
                )
                handle.remove()
                assert len(calls) == MICROBATCHES, kind
                calls.clear()
                assert split() == every, kind
                assert not calls, kind
                for name, parameter in chunk.named_parameters():
                    assert torch.equal(parameter.main_grad, expected[name]), (kind, name)

    values(run_ranks(2, on_rank))
    said = capfd.readouterr().out  # outputs of two ranks may share a line
    assert said.count("hooks on gradients") == 2, "each rank says it once"
    name = "module.decoder.layers.1.mlp.linear_fc1.weight"
    assert f"W omits 1 weight of this rank that they depend on, such as {name}" in said


def test_hooks_of_all_modules_concern_all_weights() -> None:
    """Global backward hooks (torch's ``register_module_full_backward_hook``) count as callers'
    hooks of all weights, so no weight gradient is deferred to W."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    assert callers_hooks([model]) == CallersHooks()
    for register in (
        global_hooks.register_module_full_backward_hook,
        global_hooks.register_module_full_backward_pre_hook,
    ):
        handle = register(lambda *call: None)
        trained = {*model[0].parameters(), model[1].weight}
        assert callers_hooks([model]) == CallersHooks(of_modules=frozenset(trained))
        handle.remove()
        assert callers_hooks([model]) == CallersHooks()


def halve_before_nodes(chunk: Any) -> None:
    chunk.nodes = []
    for layer in chunk.decoder.layers:
        node = node_of(layer.mlp.linear_fc1.weight)
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
        chunk.nodes.append(node)


def double_behind_nodes(chunk: Any) -> None:
    def double(weight: Tensor, *gradients: Any) -> None:
        assert weight.grad is not None
        weight.grad.mul_(2)

    chunk.nodes = []
    for layer in chunk.decoder.layers:
        weight = layer.mlp.linear_fc2.weight
        node = node_of(weight)
        node.register_hook(partial(double, weight))
        chunk.nodes.append(node)


def swap_data(chunk: Any) -> None:
    """Put hooks on linear layers that round the weight's data during the forward pass. The input's
    gradient is computed from the unrounded weight."""
    kept = {}

    def swap(module: Any, args: Any) -> None:
        kept[module] = module.weight.data
        module.weight.data = (module.weight.data * 8).round() / 8

    def swap_back(module: Any, args: Any, output: Any) -> None:
        module.weight.data = kept.pop(module)

    for layer in chunk.decoder.layers:
        for module in (layer.mlp.linear_fc1, layer.self_attention.linear_proj):
            module.register_forward_pre_hook(swap)
            module.register_forward_hook(swap_back)


SETTINGS: tuple[dict[str, Any], ...] = (
    {"schedule": "zb-h1"},
    {"schedule": "zb-v"},
    {"schedule": "zb-h1", "activation_offload": "full"},
)


@pytest.mark.parametrize("change", [halve_before_nodes, double_behind_nodes, swap_data])
def test_gradients_are_stocks(change: Callable[[Any], None]) -> None:
    """Gradients equal stock's in a model with hooks of a caller. Under split backward passes, hooks
    on autograd nodes used not to run. If a hook gave a weight other data for the forward pass, the
    I pass used to compute the input's gradient from that data, while stock computes it from the
    weight's own data."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected, plain = step(change), step(lambda chunk: None)
            changed = [name for name in plain[1] if not plain[1][name].equal(expected[1][name])]
            assert len(changed) >= LAYERS, "nothing was changed"
            for settings in SETTINGS:
                with megatron_ext.install(**settings):
                    assert_same(step(change), expected)

    values(run_ranks(2, on_rank))


def test_a_hook_that_a_loss_function_registers_runs_from_that_microbatch_on() -> None:
    """A loss function registers a hook on a weight during a step, and the hook sees the gradients
    from that microbatch on. W used to add the gradients of microbatches whose forward passes had
    run before, without calling the hook."""

    def stepped() -> tuple[Any, int]:
        calls: list[Tensor] = []

        def hooked(data: Any, model: Any) -> tuple[Tensor, Any]:
            output, loss = forward_step(data, model)

            def double(gradient: Tensor) -> Tensor:
                calls.append(gradient)
                return gradient * 2

            def and_hook(output: Tensor) -> Any:
                weight = model.decoder.layers[0].mlp.linear_fc1.weight
                if not weight._backward_hooks:
                    weight.register_hook(double)
                return loss(output)

            return output, and_hook

        call = {"seq_length": SEQUENCE, "micro_batch_size": BATCH}
        result = whole_step(build, named_parameters, hooked, batches, **call)
        return result, len(calls)

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected, calls = stepped()
            assert calls == MICROBATCHES * (rank == 1)
            with megatron_ext.install(schedule="zb-h1"):
                ours, own = stepped()
        assert own == calls
        assert_same(ours, expected)

    values(run_ranks(2, on_rank))


def sums_so_far(kind: str, records: dict[str, list[Tensor]], chunk: Any) -> None:
    """Put hooks on modules that record the accumulated gradients of their weights at the module's
    backward pass."""

    def record(layer: Any, module: Any, *gradients: Any) -> None:
        for name, weight in module.named_parameters():
            grad = torch.zeros(()) if weight.grad is None else weight.grad.clone()
            records.setdefault(f"{layer.layer_number} {name}", []).append(grad)

    for layer in chunk.decoder.layers:
        for module in (layer.mlp, layer.self_attention.linear_proj):
            if kind == "before":
                module.register_full_backward_pre_hook(partial(record, layer))
            else:
                module.register_full_backward_hook(partial(record, layer))


@pytest.mark.parametrize("kind", ["before", "behind"])
def test_hooks_of_a_modules_backward_pass_find_stocks_gradients(kind: str) -> None:
    """Backward hooks of a module find the same accumulated weight gradients as in stock. The hooks
    used to run in I, before W had added anything: hooks after the module's pass missed this
    microbatch's gradient, and hooks before the pass missed those of earlier microbatches."""

    def recorded() -> dict[str, list[Tensor]]:
        own: dict[str, list[Tensor]] = {}
        step(partial(sums_so_far, kind, own))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return {name: sums for of_rank in everyone for name, sums in of_rank.items()}

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = recorded()
            assert len(expected) == LAYERS * 6
            for schedule in ("zb-v", *at_night("zb-h1")):
                with megatron_ext.install(schedule=schedule):
                    ours = recorded()
                assert ours.keys() == expected.keys()
                for name, sums in expected.items():
                    assert len(sums) == MICROBATCHES and sums[-1].count_nonzero(), name
                    assert all(map(torch.equal, ours[name], sums)), (schedule, name)

    values(run_ranks(2, on_rank))


def depend_on_whole_gradients(calls: Counter[str], chunk: Any) -> None:
    """Put hooks of all kinds on weights. Each hook's effect is not linear, so calling it on parts
    of a gradient gives another result than calling it on the sum."""

    def of_length_one(name: str, gradient: Tensor) -> Tensor:
        calls[name] += 1
        return gradient / gradient.norm()

    def one_more(name: str, weight: Tensor, *gradients: Any) -> None:
        calls[name] += 1
        assert weight.grad is not None
        weight.grad.add_(1)

    chunk.nodes = []
    for layer in chunk.decoder.layers:
        attention, mlp = layer.self_attention, layer.mlp
        mlp.linear_fc1.weight.register_hook(partial(of_length_one, "split"))
        mlp.linear_fc1.bias.register_hook(partial(of_length_one, "not split"))
        mlp.linear_fc2.weight.register_post_accumulate_grad_hook(partial(one_more, "accumulated"))
        node = node_of(attention.linear_proj.weight)
        unit = partial(of_length_one, "before the node")
        node.register_prehook(lambda gradients, unit=unit: (unit(gradients[0]),))
        weight = attention.linear_qkv.weight
        chunk.nodes += [node, node_of(weight)]
        chunk.nodes[-1].register_hook(partial(one_more, "behind the node", weight))
    if chunk.pre_process:
        table = chunk.embedding.word_embeddings.weight
        table.register_hook(partial(of_length_one, "table"))


@pytest.mark.parametrize("wraps", [False, True], ids=["", "wrapped"])
def test_hooks_get_the_gradient_of_a_whole_sequence_once(wraps: bool) -> None:
    """Under slices of a sequence, a weight's hook gets the gradient of the whole sequence, once.
    Each slice used to call the hook with its part, so hooks that clip, draw or count ran once for
    every slice. If the model is in Megatron's data-parallel wrapper, the compared gradients are
    those in ``main_grad``."""

    def gradients(**settings: Any) -> dict[str, Tensor]:
        calls: Counter[str] = Counter()
        with pipelines_of_two(**settings):
            chunks: list[Any] = build(partial(depend_on_whole_gradients, calls))
            own = [wrapped(chunk, True) for chunk in chunks] if wraps else chunks
            for _ in range(2):  # two steps, as the second must find nothing left of the first
                run_step(own)
            parallel_state.destroy_model_parallel()
        passes = 2 * MICROBATCHES
        for name, number in calls.items():
            assert number == passes * (1 if name == "table" else LAYERS // 2), name
        assert len(calls) >= 5
        return {
            f"{number} {name}": getattr(parameter, "main_grad", parameter.grad)
            for number, chunk in enumerate(chunks)
            for name, parameter in chunk.named_parameters()
        }

    def on_rank(rank: int) -> None:
        for schedule in ("1f1b", "zb-v", *at_night("zb-h1")):
            expected = gradients(schedule=schedule)
            ours = gradients(schedule=schedule, slices=2)
            assert ours.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-6)

    values(run_ranks(2, on_rank))


HOOKED = {
    "",
    "decoder",
    "decoder.final_layernorm",
    "decoder.layers.0",
    "embedding",
    "output_layer",
}


class Collecting:
    """A hook on the last stage's decoder that collects a loss term, and the number of calls of the
    hooks by stage and module."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._terms: list[Tensor] = []

    def hook(self, chunk: Any) -> None:
        for name, module in chunk.named_modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
            if name not in HOOKED:
                continue
            rank = parallel_state.get_pipeline_model_parallel_rank()
            stage = f"{rank}.{chunk.vp_stage} {name}"
            module.register_forward_pre_hook(partial(self._count, f"{stage} before"))
            module.register_forward_hook(partial(self._count, f"{stage} behind"))
            if name == "decoder":
                module.register_forward_hook(partial(self._ask_gradient, f"{stage} gradient"))
        if chunk.post_process:
            chunk.decoder.register_forward_hook(self._collect)

    def forward_step(self, data: Any, model: Any) -> tuple[Tensor, Any]:
        output, _ = forward_step(data, model)
        return output, self._loss

    def _loss(self, output: Tensor) -> tuple[Tensor, dict[str, float]]:
        loss = output.mean() + sum(self._terms)
        self._terms.clear()
        return loss, {"loss": loss.item()}

    def _collect(self, module: Any, args: Any, output: Tensor) -> None:
        self._terms.append(output.square().mean())

    def _ask_gradient(self, name: str, module: Any, args: Any, output: Tensor) -> None:
        output.register_hook(partial(self._count, name))

    def _count(self, name: str, *call: Any) -> None:
        self.calls[name] += 1


@pytest.mark.parametrize(("schedule", "stages"), [("zb-h1", 2), ("zb-v", 4)])
def test_hooks_around_the_layers_run_once_where_passes_are_recomputed(
    schedule: str, stages: int
) -> None:
    """Hooks around the transformer layers run once for each microbatch, although its layers are
    recomputed. Both F and R used to run them: a loss term that a hook collects counted twice, and a
    hook that reads an activation's gradient failed in F, which has none. On a V the reference is
    the same schedule without recompute, because a V draws other dropout than stock."""

    def without() -> contextlib.AbstractContextManager[Any]:
        if schedule == "zb-h1":
            return contextlib.nullcontext()
        return megatron_ext.install(schedule=schedule)

    def stepped() -> tuple[Any, Counter[str]]:
        collecting = Collecting()
        call = {"seq_length": SEQUENCE, "micro_batch_size": BATCH}
        build_hooked = partial(build, collecting.hook)
        run = collecting.forward_step
        result = whole_step(build_hooked, named_parameters, run, batches, **call)
        return result, collecting.calls

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            with without():
                expected, calls = stepped()
            assert set(calls.values()) == {MICROBATCHES}
            with megatron_ext.install(schedule=schedule, recompute=f"first:{stages}"):
                ours, own = stepped()
        assert_same(ours, expected)
        assert len(own) >= len(calls)
        for name, number in own.items():
            assert number == MICROBATCHES * (2 if "layers" in name else 1), name

    values(run_ranks(2, on_rank))


@pytest.mark.parametrize(
    ("module", "is_callers"),
    [
        ("megatron.training.distillation.logits_saver", True),
        ("megatron.bridge.training.hooks", True),
        ("megatron.core.distributed.distributed_data_parallel", False),
        ("megatron_ext.adapter.step.repeatable_call", False),
        ("transformer_engine.pytorch.module.base", False),
    ],
)
def test_hooks_of_megatrons_training_are_a_callers(module: str, is_callers: bool) -> None:
    """Hooks of Megatron's training code count as a caller's, such as the one on the output layer
    that records a teacher's logits. All hooks of the package megatron used to count as part of the
    passes: that hook ran in F and in R, and each microbatch's logits were recorded twice."""

    def hook(layer: torch.nn.Module, *unused: Any) -> None:
        pass

    hook.__module__ = module
    model = torch.nn.ModuleDict({"output_layer": torch.nn.Linear(1, 1)})
    model["output_layer"].register_forward_hook(hook)
    assert hooked_around_layers(model) == (["ModuleDict.output_layer"] if is_callers else [])


def test_hooks_that_run_twice_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in the log names the hooks of a caller that run in both F and R. They do so if the
    whole stage is recomputed and not only its decoder: because the decoder is not Megatron's, as
    here, or because the stage runs slices of a sequence or enters autocast."""
    said: list[str] = []
    monkeypatch.setattr(of_callers.logger, "log", lambda level, text: said.append(text))
    config = SimpleNamespace(enable_autocast=False)
    decoder_of = partial(decoder_to_recompute, takes_slices=False)
    model = torch.nn.ModuleDict({"towers": torch.nn.Linear(2, 2), "layers": torch.nn.Linear(2, 2)})
    model["layers"].register_forward_hook(lambda *call: None)
    assert decoder_of(1, model, config) is None and not said
    model["towers"].register_forward_pre_hook(lambda *call: None)
    for _ in range(2):
        assert decoder_of(1, model, config) is None
    (line,) = said
    assert "hooks on the forward pass of ModuleDict.towers of stage 1 run twice" in line
