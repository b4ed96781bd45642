"""Tests of steps that differ: in the number of microbatches, or as evaluations with longer
sequences.

verl and slime split a batch by its tokens, and NeMo-RL and verl evaluate before they train.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_ext
from megatron_ext.adapter import programs
from megatron_ext.adapter.programs import Programs
from megatron_ext.adapter.training_globals import ramps_up_to
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule_families import zb_auto
from megatron_ext.search import best
from megatron_ext.search.extension import extended
from tests.helpers.callers import draw_by_name, first_and_last, named_parameters, small_config
from tests.helpers.combinations import at_night
from tests.helpers.ranks import run_ranks, values
from tests.helpers.short_search import shorten_search

RANKS = 2
LONGEST, BATCH, VOCABULARY = 8, 1, 32

Asked = tuple[int, int, bool]  # microbatches, sequence length, whether the step is an evaluation
EVALUATED_FIRST: list[Asked] = [
    (5, 8, True),
    (8, 6, False),
    (3, 6, False),
    (4, 8, True),
    (5, 6, False),
    (3, 6, False),
    (8, 6, False),
]


def build_chunks(varies: bool) -> list[GPTModel]:
    config = small_config(
        4, RANKS, variable_seq_lengths=varies, moe_token_dispatcher_type="alltoall"
    )
    chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=LONGEST,
            share_embeddings_and_output_weights=False,
            vp_stage=number,
            **first_and_last(number),
        )
        draw_by_name(named_parameters(chunk))
        chunks.append(chunk)
    return chunks


def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    length = tokens.shape[1]
    positions = torch.arange(length).expand(BATCH, -1)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    return model(tokens, positions, mask, labels=tokens), mean


def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    return output.mean(), {"loss": output.mean().item()}


def run(
    asked: list[Asked], watched: Callable[[], Any] = lambda: None, *, varies: bool = False
) -> tuple[list[Any], list[Any]]:
    """Run the steps ``asked``. Return the losses and gradients of all ranks by step, and what
    ``watched`` returned after each step."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
    model_parallel_cuda_manual_seed(0)
    chunks = build_chunks(varies)
    results: list[Any] = []
    seen = []
    for microbatches, length, forward_only in asked:
        generator = torch.Generator().manual_seed(length)
        data = [
            torch.randint(VOCABULARY, (BATCH, length), generator=generator)
            for _ in range(microbatches)
        ]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(data) for _ in chunks],
            model=chunks,
            num_microbatches=microbatches,
            seq_length=1 if varies else length,  # verl passes a length of 1 if lengths vary
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        seen.append(watched())
        named = [pair for chunk in chunks for pair in named_parameters(chunk)]
        own = {name: p.grad.tolist() for name, p in named if p.grad is not None}
        for _, parameter in named:
            parameter.grad = None
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, (losses, own))
        gradients = {name: grad for _, own in everyone for name, grad in sorted(own.items())}
        results.append(([loss for losses, _ in everyone for loss in losses], gradients))
    parallel_state.destroy_model_parallel()
    return results, seen


class Searches:
    """Counter of searches by the families v-auto and zb-auto, and of schedules made longer or
    shorter."""

    def __init__(self) -> None:
        self.count = self.longer_or_shorter = 0
        programs.extended = self._extended  # type: ignore[assignment]
        for module, name in ((best, "searched"), (zb_auto, "_best")):
            setattr(module, name, partial(self._counted, vars(module)[name]))

    def _extended(self, *args: Any) -> Any:
        self.longer_or_shorter += 1
        return extended(*args)

    def _counted(self, search: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.count += kwargs.get("trials") is None
        return search(*args, **kwargs)


def made_by_now() -> Programs:
    programs: Programs = get_forward_backward_func()._training._programs
    return programs


def costs_by_now() -> Costs:
    return made_by_now().costs[None]


# By day test_examples.py has zb-auto in verl's loop.
@pytest.mark.parametrize("schedule", ["v-auto", *at_night("zb-auto")])
def test_no_step_waits_for_a_search_but_the_first_of_a_training(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first step of a training waits for a search of its schedule. Each new number of
    microbatches used to start a search, for which all ranks waited, and which used the costs of the
    evaluation before, whose sequences are longer. Now steps with another number of microbatches run
    the found schedule, made longer or shorter, if the found one has enough microbatches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shorten_search(monkeypatch)

    def on_rank(rank: int) -> tuple[tuple[int, ...], str]:
        settings: dict[str, Any] = {"schedule": schedule, "memory_limit": "2"}
        printed = io.StringIO()
        with apply(cpu.patches()), contextlib.redirect_stdout(printed):
            expected, _ = run(EVALUATED_FIRST)
            searches = Searches()
            with megatron_ext.install(**settings):
                ours, seen = run(EVALUATED_FIRST, lambda: (searches.count, costs_by_now()))
            assert ours == expected
            counts, costs = zip(*seen, strict=True)
            # The schedule was adapted to 3 and to 5 microbatches, each with the output layer's W
            # fused into I and not fused.
            assert searches.longer_or_shorter == 4
            with megatron_ext.install(**settings):
                _, of_training = run(EVALUATED_FIRST[1:2], costs_by_now)
            assert of_training[0] == costs[1] == costs[-1] != costs[0]
        return counts, printed.getvalue()

    (counts, told), (of_other, _) = values(run_ranks(RANKS, on_rank))
    assert counts[0] == 0 and counts[1] > 0
    assert set(of_other) == {0}  # only one rank searches, for all ranks
    assert set(counts[1:]) == {counts[1]}
    line = f"{schedule} was searched for 8 microbatches a step, and one has come with 3: "
    assert told.count("was searched for") == told.count(line) == 1


def test_programs_that_were_not_used_for_longest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs that have not run for the longest time are dropped from memory. A program used
    to stay in memory for every number of microbatches that had occurred."""
    monkeypatch.setattr(programs, "KEPT", 2)

    def on_rank(rank: int) -> list[list[int]]:
        def kept() -> list[int]:
            kept = made_by_now()._programs.values()
            return [program.problem.microbatches for program in kept]

        with apply(cpu.patches()), megatron_ext.install(schedule="1f1b"):
            asked = [(microbatches, 6, False) for microbatches in (2, 3, 2, 4, 3)]
            return run(asked, kept)[1]

    kept, _ = values(run_ranks(RANKS, on_rank))
    assert kept == [[2], [2, 3], [3, 2], [2, 4], [4, 3]]


def test_a_limit_in_bytes_needs_the_length_of_a_sequence() -> None:
    """A memory limit in bytes is refused for a caller that does not give the sequence length. verl
    calls the schedule with a length of one token, so a limit in bytes used to allow a hundred times
    too many microbatches."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            with (
                megatron_ext.install(schedule="zb-h1", memory_limit="1GiB"),
                pytest.raises(ValueError, match=r"1GiB is in bytes, .*: write the limit as a sh"),
            ):
                run([(4, 6, False)], varies=True)
            dist.barrier()

    values(run_ranks(RANKS, on_rank))


def test_a_batch_size_that_ramps_up_is_searched_for_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under Megatron's --rampup-batch-size each batch size gets a search of its own, because each
    size lasts for many steps."""
    assert not ramps_up_to(4)
    constant = num_microbatches_calculator.ConstantNumMicroBatchesCalculator
    for calculator, expected in (
        (mock.Mock(get=lambda: 4), True),
        (mock.Mock(get=lambda: 5), False),
        (mock.Mock(spec=constant, get=lambda: 4), False),
    ):
        name = "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"
        monkeypatch.setattr(num_microbatches_calculator, name, calculator)
        assert ramps_up_to(4) == expected
