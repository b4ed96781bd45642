"""Tests of what callers add to their models: hooks, computed weights, gradient reductions of their
own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.callers import (
    Chunks,
    Gradients,
    assert_same,
    draw_by_name,
    first_and_last,
    forward_step,
    named_parameters,
    small_config,
    whole_step,
)
from tests.helpers.ranks import run_ranks, values

LAYERS, SEQUENCE, BATCH, VOCABULARY, MICROBATCHES = 4, 8, 2, 32, 4


def build(change: Callable[[Any], object] = lambda chunk: None) -> Chunks:
    """Return this rank's chunks, each after a call of ``change``."""
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    config = small_config(LAYERS, ranks)
    chunks: Chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            **first_and_last(number),
            share_embeddings_and_output_weights=False,
            vp_stage=number,
        )
        draw_by_name(named_parameters(chunk))
        change(chunk)
        chunks.append(chunk)
    return chunks


def batches(seed: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = BATCH, SEQUENCE
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(MICROBATCHES)]


def step(change: Callable[[Any], object]) -> tuple[list[Any], Gradients]:
    """Return the losses and gradients of one step of the whole pipeline."""
    call = {"seq_length": SEQUENCE, "micro_batch_size": BATCH}
    return whole_step(partial(build, change), named_parameters, forward_step, batches, **call)


def run_step(
    chunks: Chunks, forward: Callable[..., Any] = forward_step, seed: int = 2, **more: Any
) -> None:
    """Run one step of the chunks that this rank has built."""
    data = batches(seed)
    schedules.get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(data) for _ in chunks],
        model=chunks,
        num_microbatches=len(data),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
        **more,
    )


@contextlib.contextmanager
def pipelines_of_two(**settings: Any) -> Iterator[None]:
    with apply(cpu.patches()), megatron_ext.install(**settings):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        model_parallel_cuda_manual_seed(0)
        yield


class Halved(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


def compute_weights(chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        parametrize.register_parametrization(layer.mlp.linear_fc1, "weight", Halved())


def hook_weights(chunk: Any) -> None:
    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    for layer in chunk.decoder.layers:
        layer.mlp.linear_fc2.weight.register_hook(lambda gradient: gradient * 0)
        layer.self_attention.linear_qkv.weight.register_post_accumulate_grad_hook(double)


def shift_tokens(chunk: Any) -> None:
    def shifted(chunk: Any, args: Any, kwargs: Any) -> Any:
        return ((args[0] + 1) % VOCABULARY, *args[1:]), kwargs

    chunk.register_forward_pre_hook(shifted, with_kwargs=True)


@pytest.mark.parametrize("change", [compute_weights, hook_weights])
def test_weights_that_only_autograd_can_serve_have_stocks_gradients(
    change: Callable[[Any], object],
) -> None:
    """Weights that are computed from other tensors, or that have hooks, get stock's gradients,
    because autograd computes them rather than W. A gradient from W would never reach the tensors
    from which a weight is computed, and no hook would see it."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step(change)
            plain = step(lambda chunk: None)
            changed = [
                name
                for name, gradient in expected[1].items()
                if name not in plain[1] or not torch.equal(gradient, plain[1][name])
            ]
            assert len(changed) >= LAYERS, "nothing was changed"
            for schedule in ("zb-h1", "zb-v"):
                with megatron_ext.install(schedule=schedule):
                    assert_same(step(change), expected)

    values(run_ranks(2, on_rank))


def with_backward(chunk: Any, own: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    """Multiply the output of each MLP by 1 + ``own``(module, input of the module)."""

    def changed(module: Any, inputs: Any, outputs: Any) -> Any:
        hidden = inputs[0].detach().requires_grad_()
        return outputs[0] * (1 + own(module, hidden)), outputs[1]

    for layer in chunk.decoder.layers:
        layer.mlp.register_forward_hook(changed)


def backward_to_leaves(chunk: Any) -> None:
    def own(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            module.forward(hidden)[0].square().mean().backward()
        assert hidden.grad is not None
        return hidden.grad.norm()

    with_backward(chunk, own)


def backward_to_the_input(chunk: Any) -> None:
    def own(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            made = module.forward(hidden)[0].square().mean()
        return torch.autograd.grad(made, hidden)[0].norm()

    with_backward(chunk, own)


def backward_of_the_stage(chunk: Any) -> None:
    def own(module: Any, inputs: Any, outputs: Any) -> None:
        outputs[0].square().mean().backward(retain_graph=True)

    chunk.decoder.layers[-1].mlp.register_forward_hook(own)


@pytest.mark.parametrize(
    "change", [backward_to_leaves, backward_to_the_input, backward_of_the_stage]
)
def test_a_callers_own_backward_pass_inside_a_forward_pass_is_stocks(
    change: Callable[[Any], object],
) -> None:
    """A caller may run a backward pass of its own inside a forward pass. Such a training used to
    end with an AssertionError, because no W follows that backward pass. The weight gradients of the
    caller's pass are added at once, and `torch.autograd.grad` adds none. W passes of earlier
    microbatches may run after the caller's pass, so sums may have another order than stock's."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step(change)
            plain = step(lambda chunk: None)
            assert expected[0] != plain[0] or any(
                not torch.equal(gradient, plain[1][name]) for name, gradient in expected[1].items()
            )
            # `backward_of_the_stage` runs backward passes of whole stages, and only a linear
            # placement has stock's stages.
            for schedule in ("zb-h1",) if change is backward_of_the_stage else ("zb-h1", "zb-v"):
                with megatron_ext.install(schedule=schedule):
                    losses, gradients = step(change)
                assert losses == expected[0]
                torch.testing.assert_close(gradients, expected[1], rtol=1e-5, atol=1e-8)

    values(run_ranks(2, on_rank))


def test_a_callers_second_derivatives_are_refused_by_name() -> None:
    """A caller that takes second derivatives (``create_graph=True``) is refused: the weight
    gradients that W computes are unknown to autograd, so the derivatives would lack them."""

    def penalize(chunk: Any) -> None:
        def own(module: Any, hidden: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                made = module.forward(hidden)[0].square().mean()
            return torch.autograd.grad(made, hidden, create_graph=True)[0].norm()

        with_backward(chunk, own)

    def on_rank(rank: int) -> None:
        refused = pytest.raises(RuntimeError, match="create_graph=True reached a layer")
        with apply(cpu.patches()), megatron_ext.install(schedule="zb-h1"), refused:
            step(penalize)

    values(run_ranks(2, on_rank))


def checkpoint_layers(chunk: Any) -> None:
    for layer in chunk.decoder.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def test_layers_that_torch_recomputes_have_stocks_gradients() -> None:
    """Layers that recompute with torch's checkpoint get stock's gradients under a split backward
    pass. I and W use their saved tensors in one backward pass, because those can be read only
    once."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step(checkpoint_layers)
            for schedule in ("zb-h1", "zb-v"):
                with megatron_ext.install(schedule=schedule):
                    assert_same(step(checkpoint_layers), expected)

    values(run_ranks(2, on_rank))


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "zb-h1", "slices": 2},
        {"schedule": "zb-v", "recompute": f"first:{MICROBATCHES}"},
    ],
    ids=lambda settings: settings["schedule"],
)
def test_a_hook_before_the_model_gets_the_callers_arguments_each_time(
    settings: dict[str, Any],
) -> None:
    """A caller's forward pre-hook of the model gets the caller's own arguments in each call. Slices
    and recomputed passes repeat the model's call and its hook; arguments that the hook has changed
    in one call must not come to it in the next."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            losses, gradients = step(shift_tokens)
            with megatron_ext.install(**settings):
                ours, own = step(shift_tokens)
        assert len(ours) == len(losses)
        for loss, expected in zip(ours, losses, strict=True):
            assert loss["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=1e-6)

    values(run_ranks(2, on_rank))


@pytest.mark.parametrize("change", ["hook", "pre-hook", "before backward", "wrapper", "cap"])
def test_an_output_layer_that_the_caller_changed_is_refused_where_it_is_not_called(
    change: str,
) -> None:
    def on_rank(rank: int) -> None:
        with pipelines_of_two(schedule="zb-h1", vocab_parallel="1"):
            chunks: Any = build()
            if change == "hook":
                chunks[0].output_layer.register_forward_hook(lambda *call: None)
            elif change == "pre-hook":
                chunks[0].output_layer.register_forward_pre_hook(lambda *call: None)
            elif change == "before backward":
                chunks[0].output_layer.register_full_backward_pre_hook(lambda *call: None)
            elif change == "wrapper":
                chunks[0].output_layer = torch.nn.ModuleDict({"to_wrap": chunks[0].output_layer})
            else:
                chunks[0].config.final_logit_softcapping = 30.0
            named = "final_logit_softcapping=30.0" if change == "cap" else "with code added"
            with pytest.raises(ValueError, match=f"--pipeline-vocab-parallel .*{named}"):
                run_step(chunks)

    values(run_ranks(2, on_rank))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_reduction_of_the_callers_own_takes_place_once(schedule: str) -> None:
    """A caller's own gradient reduction runs once in a step. Two pipelines of two ranks have
    different data, so a sum that ran twice would be doubled."""

    def on_rank(rank: int) -> None:
        replicas = 2

        def reduce(parameters: Iterable[torch.nn.Parameter]) -> None:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())

        with pipelines_of_two(schedule=schedule):
            replica = parallel_state.get_data_parallel_rank()
            alone = []
            for seed in range(replicas):
                chunks = build()
                run_step(chunks, seed=seed)
                alone.append([parameter.grad for parameter in chunks[0].parameters()])
            chunks = build()
            config: Any = chunks[0].config
            config.no_sync_func, config.grad_sync_func = contextlib.nullcontext, reduce
            run_step(chunks, seed=replica)
            for parameter, first, second in zip(chunks[0].parameters(), *alone, strict=True):
                assert parameter.grad is not None and first is not None and second is not None
                assert torch.equal(parameter.grad, first + second)

    values(run_ranks(4, on_rank))


def test_a_reduction_by_hooks_in_the_last_backward_pass_is_refused() -> None:
    class Wrapper:
        @contextlib.contextmanager
        def no_sync(self) -> Iterator[None]:
            yield

    def on_rank(rank: int) -> None:
        with pipelines_of_two(schedule="zb-h1"):
            chunks: Any = build()
            chunks[0].config.no_sync_func = Wrapper().no_sync
            with pytest.raises(ValueError, match=r"config.no_sync_func .* set config.grad_sync_f"):
                run_step(chunks)

    values(run_ranks(2, on_rank))


def test_steps_that_no_loop_of_megatrons_runs_do_not_overlap() -> None:
    def on_rank(rank: int) -> None:
        is_for = "--pipeline-post-validation is for Megatron's own"
        with pipelines_of_two(schedule="zb-h1", post_validation=True):
            chunks = build()
            with pytest.raises(ValueError, match=is_for):
                run_step(chunks)

    values(run_ranks(2, on_rank))


def test_a_gradient_that_a_frozen_stage_would_lose_is_refused() -> None:
    """A step is refused if a stage without trained weights would lose a gradient. Here the caller
    trains a prompt outside of the model, in front of a frozen first stage."""

    def on_rank(rank: int) -> None:
        prompt = torch.zeros(SEQUENCE, BATCH, 16, requires_grad=True)

        def prompted(data: Iterator[torch.Tensor], chunk: Any) -> Any:
            given = prompt * 1 if chunk.pre_process else None
            return forward_step(data, chunk, decoder_input=given)

        with pipelines_of_two(schedule="zb-h1"):
            chunks: Any = build()
            if rank == 0:
                chunks[0].requires_grad_(False)
            run_step(chunks)  # a frozen stage without a trained prompt runs
            is_lost = "a tensor that requires a gradient, which would be lost"
            with pytest.raises(BaseException, match=is_lost if rank == 0 else ""):
                run_step(chunks, prompted)

    results = run_ranks(2, on_rank)
    assert results[0].exit_code == 0, results[0].error


def test_a_model_with_another_pipeline_is_refused() -> None:
    """A second model whose pipelines have other ranks than those of the first one is refused. It
    used to get the first model's connections, and the step ended with a KeyError."""

    def on_rank(rank: int) -> str:
        with pipelines_of_two(schedule="1f1b"):
            chunks = build()
            run_step(chunks)
            pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
            groups = ProcessGroupCollection.use_mpu_process_groups()
            groups.pp = pairs[rank // 2]
            communicator = P2PCommunicator(groups.pp, get_model_config(chunks[0]))
            with pytest.raises(ValueError, match=r"pipeline has global ranks .*, and the schedule"):
                run_step(chunks, p2p_communicator=communicator, pg_collection=groups)
            dist.barrier()  # a rank that ends would break the connections of others
            return "refused"

    assert values(run_ranks(4, on_rank)) == ["refused"] * 4
