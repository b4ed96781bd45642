"""Tests of ordering and dealing microbatches by their cost, in Megatron's own loop, under all
schedules.

Documents of Megatron's mock data differ in length, and attention stays inside a document.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.num_microbatches_calculator import (
    ConstantNumMicroBatchesCalculator,
    StepBatchsizeNumMicroBatchesCalculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

import megatron_ext
from megatron_ext.adapter.arguments import check_microbatches
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.features.arrangement.adapter import arranged_batches, document_lengths
from megatron_ext.features.arrangement.adapter.arranged_batches import ArrangedBatches
from megatron_ext.features.arrangement.adapter.document_lengths import squared_lengths
from megatron_ext.features.arrangement.adapter.sample_weights import SampleWeights
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.schedule.dealing import MicrobatchOrder, arranged, small_ends
from tests.helpers.combinations import at_night
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import Run, assert_same, losses, model_flags, train
from tests.helpers.packed import packed_on_the_cpu
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.training.test_any_model import BATCH, MICROBATCHES, SEQUENCE, blocks, vectors

Flags = dict[str, Any]
COSTS = [3.0, 1.0, 9.0, 2.0, 7.0, 5.0]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    with packed_on_the_cpu():
        yield


ORDERED: Flags = {"pipeline_microbatch_order": "small-ends"}
DEALT: Flags = {"pipeline_deal_microbatches": True}


def flags(**more: object) -> list[str]:
    return model_flags(
        **{
            "pipeline_model_parallel_size": 2,
            "num_layers": 4,
            "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": True,
            "dataloader_inter_document_masking": True,
            "train_iters": 2,
            "eval_interval": 2,
            "eval_iters": 1,
            **more,
        }
    )


def trained(ranks: int, **more: object) -> list[Run]:
    return train(ranks, flags(**more), model_provider=drawn_by_name)


def test_ours_train_the_same_microbatches_in_the_same_order_as_stock() -> None:
    """With ordered microbatches our schedules equal stock bitwise, because they read the same
    microbatches in the same order. An evaluation, which is never ordered, is equal too. The order
    differs from that in which the data arrive."""
    arrival = trained(2)
    stock = trained(2, **ORDERED)
    # The next test trains zb-h1, with dealt microbatches.
    for schedule in ("zb-v", *at_night("zb-h1")):
        assert_same(trained(2, pipeline_schedule=schedule, **ORDERED), stock)
    with pytest.raises(AssertionError):  # the gradients are summed in another order
        assert_same(stock, arrival)
    assert losses(stock)[0] == pytest.approx(losses(arrival)[0], rel=1e-6)


def test_dealt_replicas_train_the_same_global_batch() -> None:
    """Microbatches dealt to two replicas by cost are the same global batch: the loss is the mean
    over the same microbatches, and both replicas have equally many."""
    arrival = trained(4)
    stock = trained(4, **ORDERED, **DEALT)
    assert_same(trained(4, pipeline_schedule="zb-h1", **ORDERED, **DEALT), stock)
    with pytest.raises(AssertionError):  # the gradients are summed in another order
        assert_same(stock, arrival)
    assert losses(stock)[0] == pytest.approx(losses(arrival)[0], rel=1e-6)


def test_weights_from_a_file_order_microbatches_of_any_data(tmp_path: Path) -> None:
    """Microbatches of any data, also without documents, can be ordered by weights from a file.
    Our schedule reads the same order as stock, and the order differs from the one by squared
    lengths."""
    file = tmp_path / "weights.npy"
    np.save(file, np.random.default_rng(1).lognormal(0, 1, 1000))
    weighed: Flags = {**ORDERED, "pipeline_microbatch_weights": file}
    unmasked: Flags = {"dataloader_inter_document_masking": None, "eval_iters": 0}
    arrival, stock = trained(2, **unmasked), trained(2, **weighed, **unmasked)
    assert_same(trained(2, pipeline_schedule="zb-h1", **weighed, **unmasked), stock)
    with pytest.raises(AssertionError):  # the gradients are summed in another order
        assert_same(stock, arrival)
    assert losses(stock)[0] == pytest.approx(losses(arrival)[0], rel=1e-6)


def test_faults_of_weights(tmp_path: Path) -> None:
    file = tmp_path / "weights.npy"
    with pytest.raises(ValueError, match=r"--pipeline-microbatch-weights .* as a numpy array"):
        SampleWeights(file, 4)
    np.save(file, np.array([1.0, 0.0, 3.0]))
    with pytest.raises(ValueError, match=r"has shape \(3,\), and the training data has 4 samples"):
        SampleWeights(file, 4)
    weights = SampleWeights(file, 3)
    assert weights(np.array([2, 0])).tolist() == [3, 1]
    with pytest.raises(ValueError, match=r"the weight of sample 1 is 0\.0, and every"):
        weights(np.array([0, 1]))
    with pytest.raises(ValueError, match="are neither ordered nor dealt; add --pipeline-m"):
        PipelineConfig.parse(microbatch_weights=str(file))


# ---- the sampler of microbatches


def sampler(replica: int, replicas: int, consumed: int = 0, total: int = 100, size: int = 2) -> Any:
    return MegatronPretrainingSampler(total, consumed, size, replica, replicas)


def constant(batch: int, size: int, replicas: int) -> Any:
    return ConstantNumMicroBatchesCalculator(batch, size, replicas, False, 1)


def random_costs(samples: np.ndarray) -> np.ndarray:
    return np.random.default_rng(7).lognormal(0, 1, 1000)[samples]


def read(replica: int, replicas: int, calculator: Any, **more: Any) -> list[list[int]]:
    batches = ArrangedBatches(
        sampler(replica, replicas, **more),
        random_costs,
        MicrobatchOrder.SMALL_ENDS,
        calculator,
        deal=True,
    )
    return list(batches)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_each_sample_is_read_once_over_any_resume(replicas: int) -> None:
    """The ordering sampler reads each sample once. A run that resumes after any step reads the same
    microbatches in the same order as one that was not interrupted."""
    batch = 4 * 2 * replicas
    calculator = constant(batch, 2, replicas)
    whole = [read(replica, replicas, calculator) for replica in range(replicas)]
    seen = sorted(sample for rows in whole for row in rows for sample in row)
    assert seen == list(range(100 // (2 * replicas) * 2 * replicas))
    for steps in (1, 2, 3):
        for replica in range(replicas):
            resumed = read(replica, replicas, calculator, consumed=steps * batch)
            assert resumed == whole[replica][4 * steps :]
    for step in range(100 // batch):  # every sample stays in its own step
        own = [s for rows in whole for row in rows[4 * step : 4 * step + 4] for s in row]
        assert sorted(own) == list(range(step * batch, (step + 1) * batch))


def test_borders_are_the_calculators_when_batches_grow() -> None:
    calculator = StepBatchsizeNumMicroBatchesCalculator(2, 2, False, 1, "0:8 16:16")
    calculator.update(0, False)
    rows = [read(replica, 2, calculator) for replica in range(2)]
    ends = [0, 8, 16, 32, 48]
    for first, end in itertools.pairwise(ends):
        of_step = [sorted(s for row in own[first // 4 : end // 4] for s in row) for own in rows]
        assert sorted(of_step[0] + of_step[1]) == list(range(first, end))
    assert calculator.get() == 2  # the training's own calculator of batch sizes is not changed


def test_a_microbatch_costs_what_its_samples_do_and_stays_whole() -> None:
    rows = read(0, 1, constant(16, 2, 1))[:8]
    sums = [random_costs(np.array(row)).sum() for row in rows]
    assert all(second == first + 1 and first % 2 == 0 for first, second in rows)
    assert max(sums) in sums[3:5]


def test_arranging_a_step_takes_no_time_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordering a step takes under 5 ms of CPU time, for 512 microbatches of 128k tokens with the
    lengths of their documents, some 100 in each. The shortest of several measurements counts,
    because the machine has other work."""
    monkeypatch.setattr(document_lengths, "GPTDataset", SimpleNamespace)
    number, size = 512, 131072
    lengths = np.random.default_rng(1).lognormal(np.log(1000), 1.2, number * 100).astype(np.int32)
    ends = np.cumsum(lengths)
    borders = np.arange(number + 1) * size
    documents = np.searchsorted(ends, borders, side="right")
    dataset = SimpleNamespace(
        shuffle_index=np.random.default_rng(2).permutation(number),
        sample_index=np.stack([documents, borders - (ends - lengths)[documents]], axis=1),
        document_index=np.arange(len(lengths)),
        dataset=SimpleNamespace(sequence_lengths=lengths),
        config=SimpleNamespace(sequence_length=size),
    )
    assert documents[-1] > 30_000
    times = []
    for _ in range(10):
        batches = ArrangedBatches(
            sampler(0, 4, total=number, size=1),
            partial(squared_lengths, dataset),
            MicrobatchOrder.SMALL_ENDS,
            constant(number, 1, 4),
            deal=True,
        )
        start = time.process_time()
        next(iter(batches))
        times.append(time.process_time() - start)
    assert min(times) < 5e-3


# ---- ranks with different orders


def _read_two_steps(rank: int, seed: int) -> None:
    def own_costs(samples: np.ndarray) -> np.ndarray:
        return np.random.default_rng(seed).lognormal(0, 1, 1000)[samples]

    batches = iter(
        ArrangedBatches(
            sampler(rank, 2),
            own_costs,
            MicrobatchOrder.SMALL_ENDS,
            constant(16, 2, 2),
            deal=True,
        )
    )
    for _ in range(8):
        next(batches)


def test_ranks_that_order_differently_end_the_training() -> None:
    """A training ends if two ranks order microbatches differently. Otherwise activations of one
    microbatch would meet the labels of another, without an error."""

    def on_rank(rank: int) -> str:
        try:
            _read_two_steps(rank, seed=rank)
        except RuntimeError as error:
            return str(error)
        return ""

    told = values(run_ranks(2, on_rank))
    assert (
        sum(
            "the data-parallel ranks order microbatches differently: for the step after 0" in t
            for t in told
        )
        == 1
    )


def test_ranks_that_order_alike_go_on_and_the_store_does_not_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arranged_batches, "_KEYS", 2)

    def on_rank(rank: int) -> int:
        for _ in range(3):  # one loader for each of several chunks
            _read_two_steps(rank, seed=1)
        dist.barrier()
        return dist.distributed_c10d._get_default_store().num_keys()

    before, after = (max(values(run_ranks(2, on_rank))) for _ in range(2))
    assert before == after


# ---- callers that order batches of their own


@pytest.mark.parametrize("schedule", [None, "zb-h1", "zb-v"])
def test_a_caller_orders_its_own_microbatches(schedule: str | None) -> None:
    """A caller can order the microbatches of its own iterator. Results are returned in the order in
    which the microbatches arrived, and a step reads no microbatch of a later step from the
    iterator."""

    def on_rank(rank: int) -> tuple[list[Any], list[int], list[float], int]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(apply(cpu.patches()))
            if schedule is not None:
                stack.enter_context(megatron_ext.install(schedule=schedule))
            parallel_state.initialize_model_parallel(
                pipeline_model_parallel_size=2,
                virtual_pipeline_model_parallel_size=2 if schedule == "zb-v" else None,
            )
            stages = choose(schedule or "1f1b").place(2).stages_of[rank]
            model = blocks(stages)
            seen: list[int] = []

            def forward_step(data: Any, chunk: Any) -> Any:
                number, x = next(data)
                if chunk.stage == 0:
                    seen.append(number)
                return chunk(x), lambda output: (
                    output.square().mean(),
                    {"number": number, "loss": output.square().mean().item()},
                )

            def step(forward_only: bool) -> tuple[list[Any], int]:
                items = list(enumerate(vectors(MICROBATCHES + 1)))
                iterators = [iter(items) for _ in model]
                call = megatron_ext.order_microbatches(
                    get_forward_backward_func(), cost=lambda item: COSTS[item[0]]
                )
                results = call(
                    forward_step_func=forward_step,
                    data_iterator=iterators if len(model) > 1 else iterators[0],
                    model=model if len(model) > 1 else model[0],
                    num_microbatches=MICROBATCHES,
                    seq_length=SEQUENCE,
                    micro_batch_size=BATCH,
                    forward_only=forward_only,
                )
                return results, len(list(iterators[0]))

            trained, left = step(forward_only=False)
            order = list(seen)
            seen.clear()
            evaluated, _ = step(forward_only=True)
            numbers = [result["number"] for result in trained]
            same = [a["loss"] - b["loss"] for a, b in zip(trained, evaluated, strict=True)]
            # an evaluation keeps the order of arrival
            assert seen in ([], list(range(MICROBATCHES)))
            return numbers, order, same, left

    first, last = sorted(values(run_ranks(2, on_rank)), key=lambda told: len(told[1]))[::-1]
    assert first[1] == small_ends(np.array(COSTS)).tolist() != list(range(MICROBATCHES))
    results = max(first[0], last[0], key=len)
    assert results == list(range(MICROBATCHES))
    assert max(first[2] + last[2]) == 0.0
    assert first[3] == last[3] == 1


# ---- costs of microbatches


class NullTokenizer:
    """Tokenizer for Megatron's mock data, whose tokens are numbers."""

    eod, pad, vocab_size = 0, 0, 100
    unique_identifiers = "NullTokenizer"


class Documents:
    """Index of a dataset with documents of 3, 5, 4 and 8 tokens, for samples of 6 tokens and a
    label."""

    sequence_lengths = np.array([3, 5, 4, 8], dtype=np.int32)


def test_squared_lengths_are_those_of_the_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = SimpleNamespace(
        shuffle_index=np.array([1, 0, 2]),
        sample_index=np.array([[0, 0], [1, 3], [3, 0], [3, 6]]),
        document_index=np.array([0, 1, 2, 3]),
        dataset=Documents(),
        config=SimpleNamespace(sequence_length=6),
    )
    monkeypatch.setattr(document_lengths, "GPTDataset", SimpleNamespace)
    # Sample 0 has 3 tokens of document 0 and 3 of document 1, sample 1 has 2 of document 1 and 4 of
    # document 2, and sample 2 has 6 of document 3.
    squares = squared_lengths(dataset, np.array([0, 1, 2]))
    assert squares.tolist() == [4 + 16, 9 + 9, 36]


def test_they_are_those_of_megatrons_own_samples() -> None:
    """Costs by squared lengths use the lengths of documents that the cu_seqlens in Megatron's own
    samples give."""
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        inter_document_masking=True,
        tokenizer=NullTokenizer(),
        mid_level_dataset_surplus=0.005,
    )
    builder = BlendedMegatronDatasetBuilder(MockGPTDataset, (12, 0, 0), lambda: True, config)
    dataset, *_ = builder.build()
    samples = np.arange(min(len(dataset), 12))
    expected = []
    for sample in samples:
        borders = dataset[int(sample)]["cu_seqlens"].unique()
        expected.append(float((borders[1:] - borders[:-1]).to(torch.float64).square().sum()))
    assert squared_lengths(dataset, samples).tolist() == expected
    assert len(set(expected)) > 1


# ---- refusals


def refusal(config: Flags | None = None, **changes: object) -> str:
    args = SimpleNamespace(
        **{
            "dataloader_type": "single",
            "dataloader_inter_document_masking": True,
            "moe_router_load_balancing_type": "aux_loss",
            "num_experts": None,
            "data_parallel_size": 2,
            **changes,
        }
    )
    settings = {"microbatch_order": "small-ends", "deal_microbatches": True, **(config or {})}
    try:
        check_microbatches(args, PipelineConfig.parse(**settings))
    except ValueError as error:
        return str(error)
    return ""


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    assert refusal() == ""
    for changes, why in (
        ({"dataloader_type": "cyclic"}, "has a sampler of its own; write --dataloader-type single"),
        ({"dataloader_type": "external"}, "where they are made"),
        ({"sft": True}, "--sft pads all samples"),
        ({"dataloader_inter_document_masking": False}, "all microbatches cost the same"),
        ({"hybrid_context_parallel": True}, "deals sequences by itself"),
        ({"phase_transition_iterations": [3]}, "borders of steps would be lost"),
        (
            {"num_experts": 4, "moe_router_load_balancing_type": ["global_aux_loss"]},
            "running mean over microbatches",
        ),
        ({"data_parallel_size": 1}, "there is one data-parallel replica"),
    ):
        text = refusal(**changes)
        assert text.startswith("--pipeline-deal-microbatches: ") and why in text
    nothing: Flags = {"microbatch_order": None, "deal_microbatches": None}
    assert refusal(nothing, dataloader_type="cyclic") == ""


def test_arrangements_are_those_of_the_page() -> None:
    costs = np.array([9.0, 8, 7, 6, 5, 4, 3, 2])
    assert costs[arranged(costs, 2, deal=True)].tolist() == [[9, 6, 5, 2], [8, 7, 4, 3]]
