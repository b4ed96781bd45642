"""Tests of callers of Megatron's schedule that split the vocabulary over the ranks: their numbers,
and refusals."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Callable, Iterator
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
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.nn.utils import parametrize

import megatron_ext
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from tests.helpers.callers import small_config
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.callers.test_callers_hooks import wrapped

RANKS = 2
SEQUENCE, BATCH, VOCABULARY, MICROBATCHES, HIDDEN = 8, 2, 32, 6, 16
TABLES = ("embedding.word_embeddings.weight", "output_layer.weight")


def build(kind: type[GPTModel] = GPTModel, vocabulary: int = VOCABULARY) -> GPTModel:
    """Return this rank's stage, with weights drawn by name; a split table has this rank's rows."""
    config = small_config(RANKS, RANKS, hidden_size=HIDDEN)
    model = kind(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=vocabulary,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    for name, parameter in model.named_parameters():
        whole = torch.empty(vocabulary, HIDDEN) if name in TABLES else parameter.detach()
        number = zlib.crc32(name.encode()) + (0 if name in TABLES else dist.get_rank())
        whole.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
        if len(parameter) < len(whole):
            whole = whole.chunk(RANKS)[dist.get_rank()]
        parameter.data.copy_(whole)
    return model


def loss_of(weights: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return a weighted sum of the tokens' losses, the sum of weights in place of a token count,
    and the reported loss."""
    loss = (losses * weights).sum()
    return loss, weights.sum().int(), {"loss": loss.detach().clone()}


def forward_step(data: Iterator[Tensor], model: Any, **more: Any) -> tuple[Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    labels = tokens.roll(-1, 1)
    output = model(tokens, positions, mask, **{"labels": labels} | more)
    return output, partial(loss_of, (tokens % 3).float())


def step(
    model: Any,
    forward_step: Callable[..., Any] = forward_step,
    forward_only: bool = False,
    **more: Any,
) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    data = [
        torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        for _ in range(MICROBATCHES)
    ]
    losses: list[Any] = schedules.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(data),
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        p2p_communicator=P2PCommunicator(
            parallel_state.get_pipeline_model_parallel_group(), model.config
        ),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        **more,
    )
    return losses


@contextlib.contextmanager
def pipeline(**settings: Any) -> Iterator[None]:
    """Initialize Megatron on these ranks, with our ``settings`` installed if there are any."""
    with apply(cpu.patches()), contextlib.ExitStack() as stack:
        if settings:
            stack.enter_context(megatron_ext.install(**settings))
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
        model_parallel_cuda_manual_seed(0)
        yield
        parallel_state.destroy_model_parallel()


def gradients(model: GPTModel) -> dict[str, Tensor]:
    """Return the gradients of all ranks. Those of a split table are joined by rows."""
    own = {}
    for name, parameter in model.named_parameters():
        name = name.replace("parametrizations.weight.original", "weight")
        gradient = getattr(parameter, "main_grad", parameter.grad)
        own[name if name in TABLES else f"{dist.get_rank()} {name}"] = gradient
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, own)
    return {
        name: torch.cat([of_rank[name] for of_rank in everyone if name in of_rank])
        for name in {name for of_rank in everyone for name in of_rank}
    }


@pytest.mark.parametrize("variant", ["1", "2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_and_losses_are_stocks(schedule: str, variant: str) -> None:
    """A caller with a split vocabulary gets stock's gradients and losses, with process groups of
    its own, a weighted loss and no data-parallel wrapper."""

    def trained() -> tuple[list[float], dict[str, Tensor]]:
        model = build()
        losses = step(model) + step(model, forward_only=True)
        return [float(loss["loss"]) for loss in losses], gradients(model)

    def on_rank(rank: int) -> None:
        with pipeline():
            expected_losses, expected = trained()
        with pipeline(schedule=schedule, vocab_parallel=variant):
            losses, ours = trained()
        assert len(losses) == (2 * MICROBATCHES if rank == RANKS - 1 else 0)
        assert losses == pytest.approx(expected_losses, rel=2**-21)
        assert {name: gradient.shape for name, gradient in ours.items()} == {
            name: gradient.shape for name, gradient in expected.items()
        }
        for name, gradient in ours.items():
            largest = expected[name].abs().max()
            assert (gradient - expected[name]).abs().max() <= 2**-20 * largest, name

    values(run_ranks(RANKS, on_rank))


def tables_of(model: Any) -> Iterator[Any]:
    """Yield the embedding and the output layer that ``model`` has on this rank, whole or in
    part."""
    if hasattr(model, "embedding"):
        yield model.embedding.word_embeddings
    if hasattr(model, "output_layer"):
        yield model.output_layer


Note = Callable[[], None]  # called at each call of a hook


def freeze(note: Note, table: Any) -> None:
    def nothing(gradient: Tensor) -> Tensor:
        note()
        return gradient * 0

    table.weight.register_hook(nothing)


def double_what_is_accumulated(note: Note, table: Any) -> None:
    def double(weight: Tensor) -> None:
        note()
        assert weight.grad is not None
        weight.grad.mul_(2)

    table.weight.register_post_accumulate_grad_hook(double)


def halve_before_the_node(note: Note, table: Any) -> None:
    def halve(gradients: tuple[Tensor]) -> tuple[Tensor]:
        note()
        return (gradients[0] * 0.5,)

    table.node = table.weight.expand_as(table.weight).grad_fn.next_functions[0][0]
    table.node.register_prehook(halve)


class Doubled(torch.nn.Module):
    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def forward(self, rows: Tensor) -> Tensor:
        doubled = rows * 2
        if doubled.requires_grad:
            doubled.register_hook(lambda gradient: self._note())
        return doubled


def compute_from_others(note: Note, table: Any) -> None:
    parametrize.register_parametrization(table, "weight", Doubled(note))


@pytest.mark.parametrize(
    ("change", "wraps", "variant"),
    [
        (freeze, False, "1"),
        (freeze, True, "2"),
        (double_what_is_accumulated, False, "2"),
        (halve_before_the_node, False, "1"),
        (halve_before_the_node, True, "2"),
        (compute_from_others, False, "2"),
        (compute_from_others, True, "1"),
    ],
)
def test_what_depends_on_a_tables_gradient_gets_it(
    change: Callable[[Note, Any], None], wraps: bool, variant: str
) -> None:
    """Hooks on a split table, and parameters from which its rows are computed, get the table's
    gradient as in stock. Our passes used to add to the table's gradient by themselves. A hook that
    freezes the table, which stock calls 32 times here, was never called, so the table was trained.
    If rows are computed from other parameters, their gradient never reached these parameters."""

    def trained(calls: list[int]) -> dict[str, Tensor]:
        model = build()
        tables = list(tables_of(model))
        for table in tables:
            change(lambda: calls.append(1), table)
        step(wrapped(model, overlap=True) if wraps else model)
        assert len(calls) == MICROBATCHES * len(tables)
        return gradients(model)

    def on_rank(rank: int) -> None:
        with pipeline():
            expected = trained([])
        with pipeline(schedule="zb-h1", vocab_parallel=variant):
            ours = trained([])
        assert ours.keys() == expected.keys()
        for name, gradient in expected.items():
            assert ours[name].count_nonzero() or (change is freeze and name in TABLES), name
            largest = gradient.abs().max()
            assert (ours[name] - gradient).abs().max() <= 2**-20 * largest, name

    values(run_ranks(RANKS, on_rank))


def test_a_hook_before_the_embedding_runs_with_its_tokens_on_the_first_stage() -> None:
    """A caller's forward pre-hook of the embedding runs as in stock: on the first stage, once for
    each microbatch, with the tokens. With a split vocabulary the hook used to run once in each step
    on every rank, without arguments, together with Megatron's hooks that wait for gathered
    weights."""

    def calls_of(steps: Callable[[GPTModel], object]) -> list[tuple[int, ...]]:
        model, calls = build(), []
        for part in model.modules():
            if isinstance(part, VocabParallelEmbedding):
                part.register_forward_pre_hook(lambda part, args: calls.append(args[0].shape))
        steps(model)
        return calls

    def on_rank(rank: int) -> None:
        with pipeline():
            expected = calls_of(step)
        assert len(expected) == (MICROBATCHES if rank == 0 else 0)
        with pipeline(schedule="zb-h1", vocab_parallel="1"):
            assert calls_of(step) == expected

    values(run_ranks(RANKS, on_rank))


def test_hooks_around_recomputed_layers_run_once() -> None:
    """Hooks around recomputed layers run once for each microbatch. With a split vocabulary the last
    stage's output is needed in F, so both F and R used to run the hooks."""

    def trained(hook: bool) -> tuple[list[float], dict[str, Tensor], int]:
        model: Any = build()
        calls: list[Any] = []
        if hook:
            model.decoder.register_forward_hook(lambda *call: calls.append(call[2].grad_fn))
        losses = [float(loss["loss"]) for loss in step(model)]
        assert None not in calls
        return losses, gradients(model), len(calls)

    def on_rank(rank: int) -> None:
        with pipeline(schedule="zb-h1", vocab_parallel="1"):
            losses, expected, _ = trained(hook=False)
        with pipeline(schedule="zb-h1", vocab_parallel="1", recompute="first:2"):
            ours, own, calls = trained(hook=True)
        assert calls == MICROBATCHES
        assert ours == losses
        assert all(torch.equal(own[name], gradient) for name, gradient in expected.items())

    values(run_ranks(RANKS, on_rank))


def twice(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    forward_step(iter([torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)]), model)
    return forward_step(data, model)


def scaled(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    output, loss = forward_step(data, model)
    return output * 2, loss


def autocast(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    with torch.autocast("cpu", torch.bfloat16):
        return forward_step(data, model)


class Custom(GPTModel):
    pass


def frozen() -> GPTModel:
    model = build()
    model.get_parameter("embedding.word_embeddings.weight").requires_grad_(False)
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "the model is called twice": (
        lambda: step(build(), twice),
        "calls the model once .* called the model 2 times",
    ),
    "the output is changed": (lambda: step(build(), scaled), "returns its output unchanged"),
    "another precision": (
        lambda: step(build(), autocast),
        "calls the model within torch.autocast",
    ),
    "no labels": (
        lambda: step(build(), partial(forward_step, labels=None)),
        "called with labels on the stage that has the loss",
    ),
    "an output head of one's own": (
        lambda: step(build(), partial(forward_step, output_processor=print)),
        "custom output head",
    ),
    "embeddings of one's own": (
        lambda: step(
            build(), partial(forward_step, decoder_input=torch.zeros(SEQUENCE, BATCH, HIDDEN))
        ),
        "does not go with the model's argument decoder_input",
    ),
    "data that is no loss": (
        lambda: step(build(), forward_only=True, collect_non_loss_data=True),
        "each rank has a part of the logits only",
    ),
    "another model": (lambda: build(Custom), "Custom is a subclass, which may use these"),
    "a vocabulary that does not divide": (
        lambda: build(vocabulary=33),
        "33 cannot be split evenly over 2 ranks .*: pad it to 34",
    ),
    "a frozen table": (lambda: step(frozen()), "frozen embedding or output layer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused(case: str) -> None:
    """A model that cannot have a split vocabulary is refused by the rank that notices. Its error
    ends the step of the other ranks too."""
    run, text = REFUSED[case]

    def on_rank(rank: int) -> str:
        with pipeline(schedule="1f1b", vocab_parallel="2"):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                run()
            return f"{type(caught.value).__name__}: {caught.value}"

    errors = values(run_ranks(RANKS, on_rank))
    assert all(error.startswith(("ValueError: ", "PeerFailure: ")) for error in errors), errors
    refusals = [error for error in errors if error.startswith("ValueError")]
    assert refusals
    for error in refusals:
        assert re.search(text, error), error
