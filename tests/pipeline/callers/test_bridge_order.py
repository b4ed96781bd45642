"""Tests of ordering and dealing microbatches by their cost in Megatron-Bridge's own loop and
loader."""

from __future__ import annotations

import functools
import importlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.config import PipelineConfig
from megatron_ext.features.arrangement.adapter.arranged_batches import ArrangedSteps
from megatron_ext.launch.installation import install
from megatron_ext.schedule.dealing import MicrobatchOrder
from scripts.caller_packages import prepare
from tests.helpers import bridge_on_cpu
from tests.helpers.bridge_on_cpu import Job, put
from tests.helpers.combinations import nightly
from tests.helpers.megatron_runs import Run, assert_same, losses
from tests.helpers.packed import packed_on_the_cpu
from tests.helpers.ranks import HANGS, lasting_folder, run_ranks, values

FOLDER = lasting_folder()
ORDER: dict[str, Any] = {"microbatch_order": "small-ends", "deal_microbatches": True}


SEQUENCE = 17  # tokens of a pack, and one for the label of the last token


def packs() -> list[dict[str, Any]]:
    """Packs of conversations with 2 to 16 tokens, as Bridge prepares them."""
    random, made = Random(1), []
    for _ in range(40):
        starts, tokens = [], 0
        while tokens < SEQUENCE - 1:
            starts.append(tokens)
            tokens = min(tokens + random.randint(3, SEQUENCE), SEQUENCE)
        words = [random.randint(1, 60) for _ in range(tokens)]
        made.append({"input_ids": words, "seq_start_id": starts, "loss_mask": [1] * tokens})
    return made


def packed(config: Any) -> None:
    """Set Bridge's packed data and its sampler of whole steps, for two replicas of four
    microbatches."""
    base: Any = importlib.import_module("megatron.bridge.data.base")
    packing: Any = importlib.import_module("megatron.bridge.data.packing.gpt_sft")

    @dataclass
    class Packs(base.DatasetProvider):
        seq_length: int = 16
        enable_offline_packing: bool = True
        offline_packing_specs: Any = None

        def build_datasets(self, context: Any) -> tuple[Any, None, None]:
            path = Path(tempfile.mkdtemp(dir=FOLDER)) / "packs.npy"
            np.save(path, np.array(packs(), dtype=object), allow_pickle=True)
            dataset = packing.GPTSFTPackedDataset(
                str(path),
                SimpleNamespace(eos_id=0),
                max_seq_length=16,
                max_num_samples=context.train_samples,
                pad_to_max_length=True,
                prompt_template="{text} {answer}",
            )
            return dataset, None, None

    specs: Any = importlib.import_module("megatron.bridge.data.packing.config")
    config.dataset = Packs(dataloader_type="batch", num_workers=0, persistent_workers=False)
    config.dataset.offline_packing_specs = specs.PackedSequenceSpecs(packed_sequence_size=16)
    put(
        config,
        {
            "model.position_embedding_type": "rope",
            "model.share_embeddings_and_output_weights": False,
        },
    )


def arranged_by_stock(config: Any) -> None:
    """Set Bridge's own schedule with microbatches in the order that our schedules read."""
    packed(config)
    importlib.import_module("megatron.bridge.data.loaders")
    install(PipelineConfig.parse(**ORDER))


def global_balance(config: Any) -> None:
    packed(config)
    put(
        config,
        {
            "model.num_moe_experts": 4,
            "model.moe_router_load_balancing_type": "global_aux_loss",
        },
    )


WEIGHTS = FOLDER / "weights.npy"
WEIGHED: dict[str, Any] = {**ORDER, "microbatch_weights": str(WEIGHTS)}


def weighed_by_stock(config: Any) -> None:
    packed(config)
    importlib.import_module("megatron.bridge.data.loaders")
    install(PipelineConfig.parse(**WEIGHED))


OURS = {"costs": "f=1,i=1,w=1,comm=0", **ORDER}
JOBS = (
    Job("arrival", packed, ranks=4),
    Job("stock", arranged_by_stock, ranks=4),
    *(Job(name, packed, {"schedule": name, **OURS}, ranks=4) for name in ("zb-h1", "zb-v")),
    Job("weighed by stock", weighed_by_stock, ranks=4),
    Job("weighed", packed, {"schedule": "zb-v", **OURS, **WEIGHED}, ranks=4),
    Job("equal", ours={"schedule": "zb-h1", **OURS}),
    Job("experts", global_balance, {"schedule": "zb-h1", **OURS}),
)


def costs(samples: np.ndarray) -> np.ndarray:
    return np.asarray(samples % 7, dtype=np.float64)


def read(replica: int, consumed: int, *, is_arranged: bool, epochs: int = 2) -> list[list[int]]:
    """Return, by step, the samples that ``replica`` of two reads with Bridge's sampler: 20 samples
    in steps of 8, the last one padded."""
    samplers: Any = importlib.import_module("megatron.bridge.data.samplers")
    batches = samplers.MegatronPretrainingBatchSampler(
        20,
        consumed,
        1,
        8,
        replica,
        2,
        drop_last=False,
        pad_samples_to_global_batch_size=True,
        seed=3,
    )
    if is_arranged:
        batches = ArrangedSteps(batches, costs, MicrobatchOrder.SMALL_ENDS, deal=True)
    return [own for _ in range(epochs) for own in batches]


def all_reads() -> dict[str, list[list[list[int]]]]:
    """Return the samples that each of two replicas reads, step by step, for three ways to read
    them."""
    return {
        "plain": [read(replica, 0, is_arranged=False) for replica in (0, 1)],
        "arranged": [read(replica, 0, is_arranged=True) for replica in (0, 1)],
        "resumed": [read(replica, 16, is_arranged=True) for replica in (0, 1)],
    }


def work(folder: Path) -> tuple[dict[str, list[Run] | str], dict[str, list[list[list[int]]]]]:
    runs = bridge_on_cpu.run(folder, JOBS)
    return runs, all_reads()


@functools.cache
def results() -> tuple[dict[str, list[Run] | str], dict[str, list[list[list[int]]]]]:
    folder, problem = prepare("bridge")
    if problem:
        pytest.skip(f"Megatron-Bridge cannot be installed with pip: {problem}")
    # Weights of samples, for all microbatches of four steps.
    np.save(WEIGHTS, np.random.default_rng(4).lognormal(0, 1, 32))
    with packed_on_the_cpu():
        ranks = run_ranks(
            1, lambda rank: work(folder), timeout=HANGS * (1 + len(JOBS)), connect=False
        )
    (made,) = values(ranks)
    return made


def runs(name: str) -> list[Run]:
    made = results()[0][name]
    assert not isinstance(made, str), made
    return made


@nightly("Megatron's own loop: test_microbatch_order.py")
def test_bridge_reads_the_same_microbatches_in_the_same_order() -> None:
    """Bridge reads the same microbatches in the same order under our schedule and under its own, so
    losses are bitwise equal. The order differs from that in which the data arrive."""
    arrival, stock = runs("arrival"), runs("stock")
    for name in ("zb-h1", "zb-v"):
        assert {run.schedule for run in runs(name)} == {"PipelineStep"}
        assert_same(runs(name), stock)
    with pytest.raises(AssertionError):  # the gradients are summed in another order
        assert_same(stock, arrival)
    assert losses(stock)[0] == pytest.approx(losses(arrival)[0], rel=1e-6)


@nightly("Megatron's own loop: test_microbatch_order.py")
def test_bridge_orders_by_weights_of_a_file() -> None:
    """Bridge orders microbatches by the weights in a file, and our schedule has the same losses
    as Bridge's own in that order, bitwise. The order by the lengths of conversations is another
    one."""
    stock = runs("weighed by stock")
    assert {run.schedule for run in runs("weighed")} == {"PipelineStep"}
    assert_same(runs("weighed"), stock)
    with pytest.raises(AssertionError):  # the gradients are summed in another order
        assert_same(stock, runs("stock"))


@nightly("the same refusals of Megatron's flags: test_microbatch_order.py")
def test_configs_that_cannot_be_arranged_are_refused() -> None:
    for name, why in (("equal", "dataset.inter_document_masking"), ("experts", "running mean")):
        refused = results()[0][name]
        assert isinstance(refused, str) and why in refused


@nightly("Megatron's own sampler: test_microbatch_order.py")
def test_each_pack_is_read_once_in_its_step_over_epochs_and_resumes() -> None:
    """Arranged microbatches read each pack once, in the step in which Bridge's sampler reads it,
    over several epochs (which the sampler shuffles) and after a resume. A step that the sampler
    fills up with padding is not rearranged."""
    made = results()[1]
    plain, arranged, resumed = made["plain"], made["arranged"], made["resumed"]
    assert [len(replica) for replica in arranged] == [6, 6]
    for step in range(6):
        expected, own = (sorted(a[step] + b[step]) for a, b in (plain, arranged))
        assert own == expected
        padded = -1 in expected
        assert padded is (step in (2, 5))
        assert ([r[step] for r in plain] == [r[step] for r in arranged]) is padded
    assert [replica[:4] for replica in resumed] == [replica[2:] for replica in arranged]
