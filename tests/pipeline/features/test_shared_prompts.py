"""Tests of answers that share a prompt, computed once, under every kind of schedule.

Gradients are compared with stock Megatron on separate sequences: they agree to 2e-6 of a tensor's
norm. One microbatch of ours is a pack of several prompts with their answers; in stock's step each
sequence is a microbatch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from torch import Tensor
from torch.nn.functional import pad

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.callers import (
    Gradients,
    assert_same,
    draw_by_name,
    first_and_last,
    named_parameters,
    small_config,
    whole_step,
)
from tests.helpers.combinations import nightly
from tests.helpers.packed import shared_prompts_on_the_cpu
from tests.helpers.ranks import run_ranks, values

LAYERS, VOCABULARY = 8, 32

# A step is a list of microbatches. A microbatch is a list of groups, each of a prompt and its
# answers, given by their numbers of tokens.
Groups = list[tuple[int, list[int]]]
STEP: list[Groups] = [
    [(6, [3, 1, 4])],
    [(2, [5, 2]), (5, [1, 3])],
    [(4, [2, 2]), (3, [6])],
    [(9, [1, 1, 2, 1])],
    [(1, [4, 3]), (7, [2, 0])],
]
Batch = dict[str, Any]


@pytest.fixture(autouse=True)
def _attention_to_prompts() -> Iterator[None]:
    with shared_prompts_on_the_cpu():
        yield


def sequences(step: Sequence[Groups]) -> Iterator[list[Batch]]:
    """Yield the sequences of each microbatch. Losses of an answer's tokens have weights, and a
    prompt's losses do not count, as in reinforcement learning."""
    generator = torch.Generator().manual_seed(3)

    def drawn(length: int) -> Tensor:
        return torch.randint(VOCABULARY, (length,), generator=generator)

    for groups in step:
        made = []
        for number, (prompt, answers) in enumerate(groups):
            of_prompt = drawn(prompt)
            for answer in answers:
                tokens = torch.cat([of_prompt, drawn(answer + 1)])
                weights = torch.rand(prompt + answer, generator=generator)
                weights[: prompt - 1] = 0
                made.append(
                    {
                        "tokens": tokens[:-1],
                        "labels": tokens[1:],
                        "weights": weights,
                        "prompt": prompt,
                        "group": number,
                    }
                )
        yield made


def dealt(replicas: int) -> list[list[list[Batch]]]:
    """Return the sequences of each microbatch of each data-parallel replica: all of `STEP` on one,
    two microbatches on each of several."""
    step = STEP if replicas == 1 else [STEP[n % len(STEP)] for n in range(2 * replicas)]
    made = [*sequences(step)]
    return [made[number::replicas] for number in range(replicas)]


def microbatches(is_shared: bool, replicas: int) -> list[Any]:
    """Return the microbatches of a step as `whole_step` takes them. Unless prompts are shared, each
    sequence is a microbatch of its own."""
    of_replicas: list[Any] = dealt(replicas)
    if not is_shared:
        of_replicas = [[one for several in part for one in several] for part in of_replicas]
    return of_replicas if replicas > 1 else of_replicas[0]


def run_apart(
    multiple: int, data: Iterator[Batch], model: Any
) -> tuple[Tensor, Callable[..., Any]]:
    one = next(data)
    padding = -len(one["tokens"]) % multiple
    tokens, labels, weights = (
        pad(one[name], (0, padding))[None] for name in ("tokens", "labels", "weights")
    )
    positions = torch.arange(tokens.size(1))[None]
    output = model(tokens, positions, None, labels=labels)
    return output, partial(sum_of_losses, weights)


def run_together(
    multiple: int, data: Iterator[list[Batch]], model: Any
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(data)
    shared = megatron_ext.share_prompts(
        [len(one["tokens"]) for one in batch],
        [one["prompt"] for one in batch],
        [one["group"] for one in batch],
        multiple=multiple,
        device="cpu",
    )
    tokens, labels, weights = (
        torch.cat([one[name] for one in batch])[None] for name in ("tokens", "labels", "weights")
    )
    output = model(
        shared.once(tokens),
        shared.position_ids,
        None,
        labels=shared.once(labels),
        packed_seq_params=shared.packed_seq_params,
    )

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        return sum_of_losses(weights, shared.in_sequences(output))

    return output, loss_of


def sum_of_losses(weights: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the weighted sum of losses, the number of tokens that count, and the reported loss."""
    loss = (output * weights).sum()
    return loss, (weights > 0).sum().int(), {"loss": loss.item()}


def chunks_of(tensor_parallel: int, settings: dict[str, Any]) -> list[torch.nn.Module]:
    config = small_config(
        LAYERS,
        parallel_state.get_pipeline_model_parallel_world_size(),
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        **settings,
    )
    chunks: list[torch.nn.Module] = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
            vocab_size=VOCABULARY,
            max_sequence_length=16,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=number,
            **first_and_last(number),
        )
        draw_by_name(named_parameters(chunk))
        chunks.append(chunk)
    return chunks


def names(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters with the tensor-parallel rank in their names, because each such rank has
    a part of a weight."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in named_parameters(chunk):
        if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None:
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(parameter.grad, group=group)
        yield f"{name} {rank}", parameter


def step(
    *,
    is_shared: bool,
    tensor_parallel: int = 1,
    replicas: int = 1,
    forward_only: bool = False,
    **settings: Any,
) -> tuple[list[Any], Gradients]:
    return whole_step(
        partial(chunks_of, tensor_parallel, settings),
        names,
        partial(run_together if is_shared else run_apart, tensor_parallel),
        partial(microbatches, is_shared, replicas),
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        seq_length=1,
        micro_batch_size=1 if replicas == 1 else 2,  # without effect, since lengths vary
        forward_only=forward_only,
    )


def losses_of(
    step: tuple[list[Any], Gradients], *, is_shared: bool, replicas: int = 1
) -> list[float]:
    """Return the losses of the microbatches of a step, in order, of each replica."""
    losses = iter([loss["loss"] for loss in step[0]])
    counts = [1 if is_shared else len(several) for part in dealt(replicas) for several in part]
    return [sum(itertools.islice(losses, count)) for count in counts]


def assert_close(
    ours: tuple[list[Any], Gradients], stocks: tuple[list[Any], Gradients], replicas: int
) -> None:
    assert losses_of(ours, is_shared=True, replicas=replicas) == pytest.approx(
        losses_of(stocks, is_shared=False, replicas=replicas), rel=1e-6
    )
    assert ours[1].keys() == stocks[1].keys()
    for name, gradient in ours[1].items():
        expected = stocks[1][name]
        assert (gradient - expected).norm() <= 2e-6 * expected.norm(), name


def all_schedules(
    schedules: Sequence[str | None], rank: int, *, only: bool = False, **settings: Any
) -> None:
    """Compare a step with shared prompts under each of ``schedules`` with stock's step on separate
    sequences. None is stock's own schedule."""
    ours: dict[str, Any] = settings.pop("ours", {})
    with apply(cpu.patches()):
        stock = step(is_shared=False, forward_only=only, **settings)
        made = []
        for schedule in schedules:
            with megatron_ext.install(schedule=schedule, shared_prompts="exact", **ours):
                made.append(step(is_shared=True, forward_only=only, **settings))
            assert_close(made[-1], stock, settings.get("replicas", 1))
            assert bool(made[-1][1]) is not only
        # All schedules sum in the same order. The order in which gloo sums a gradient over four
        # replicas depends on the gradient's place in a bucket, and so on the stages of a rank.
        if "replicas" not in settings:
            for each in made[1:]:
                assert_same(each, made[0])


def run(ranks: int, *schedules: str | None, **settings: Any) -> None:
    values(run_ranks(ranks, functools.partial(all_schedules, schedules, **settings)))


def test_a_line_and_a_v_train_as_sequences_apart() -> None:
    """Shared prompts train under stock's own schedule, a linear one and a V, with the gradients of
    stock on separate sequences."""
    run(2, None, "zb-h1", "zb-v")


@nightly("test_a_line_and_a_v_train_as_sequences_apart")
@pytest.mark.parametrize(
    ("ranks", "schedules"),
    [
        (1, [None]),
        (2, [None, "1f1b", "interleaved-zb", "v-half", "v-auto", "hanayo"]),
        (4, [None, "zb-h1", "zb-v"]),
    ],
)
def test_other_schedules_and_numbers_of_ranks(ranks: int, schedules: list[str | None]) -> None:
    run(ranks, *schedules)


@nightly("test_a_line_and_a_v_train_as_sequences_apart")
@pytest.mark.parametrize("schedules", [[None, "zb-h1"], ["zb-v", "interleaved-zb"]])
def test_with_tensor_and_sequence_parallelism(schedules: list[str | None]) -> None:
    run(4, *schedules, tensor_parallel=2)


@nightly("test_a_line_and_a_v_train_as_sequences_apart")
def test_four_replicas_of_microbatches_of_several_prompts() -> None:
    """Gradients that Megatron's data-parallel wrapper averages over four replicas are those of
    separate sequences, though replicas then have different numbers of microbatches."""
    run(8, "zb-h1", "zb-v", replicas=4)


@nightly("test_a_line_and_a_v_train_as_sequences_apart")
def test_forward_passes_alone() -> None:
    run(2, None, "zb-h1", "zb-v", only=True)


@nightly("test_a_line_and_a_v_train_as_sequences_apart")
@pytest.mark.parametrize(
    "settings",
    [
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 16,
            "add_bias_linear": False,
            "moe_router_load_balancing_type": "none",
        },
        {"num_query_groups": 1},
    ],
    ids=["full recompute", "experts", "grouped queries"],
)
def test_with_other_settings_of_megatron(settings: dict[str, Any]) -> None:
    run(2, None, "zb-h1", "zb-v", **settings)


@nightly("test_a_line_and_a_v_train_as_sequences_apart")
def test_with_passes_that_are_recomputed() -> None:
    run(2, "zb-h1", "zb-v", ours={"recompute": "first:2"})
