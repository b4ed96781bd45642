"""Tests of the bytes of the model and of the logits on each rank, with and without a split
vocabulary.

``pytest -rP`` shows the numbers. The model is small and its vocabulary large, so that the tables
are nearly all of the model. The bytes of parameters, gradients and optimizer states equal those
that the command `plan` computes from the dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import training
from torch import Tensor

from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.model_memory import TrainingState, bytes_of_ranks
from megatron_ext.cost_model.short_form import Described
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import VocabularyParallel
from tests.helpers.combinations import at_night, each_once
from tests.helpers.documents import DOCS
from tests.helpers.megatron_runs import model_flags, train
from tests.helpers.storages import LiveStorages, storages

RANKS, HIDDEN, SEQUENCE = 4, 16, 16
FLAGS: dict[str, object] = {
    "pipeline_model_parallel_size": RANKS,
    "hidden_size": HIDDEN,
    "seq_length": SEQUENCE,
    "train_iters": 1,
    "global_batch_size": RANKS,
    "bf16": True,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "rerun_mode": "disabled",
    "pipeline_schedule": "1f1b",
}


class Logits(LiveStorages):
    """Largest number of bytes at a time in tensors with a column for each row of this rank's output
    layer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.most = 0
        self._rows = rows
        self._found: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, Tensor) and result.dim() and result.shape[-1] == self._rows:
            self._found |= {storage._cdata for storage in storages(result)} & self.maker_of.keys()
            sizes = self.sizes()
            self._found &= sizes.keys()
            self.most = max(self.most, sum(sizes[address] for address in self._found))
        return result


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of ``tensors``; each storage counts once."""
    return sum({s._cdata: s.nbytes() for s in storages(list(tensors))}.values())


def count(monkeypatch: pytest.MonkeyPatch, folder: Path, rows: int) -> None:
    """Make each rank write the bytes that it stores after its first step to ``folder``."""
    setup, log = training.setup_model_and_optimizer, training.training_log
    logits = Logits(rows)
    made: list[Any] = []

    def begin(*args: Any, **kwargs: Any) -> Any:
        made[:] = result = setup(*args, **kwargs)
        logits.__enter__()
        return result

    def end(*args: Any, **kwargs: Any) -> Any:
        logits.__exit__(None, None, None)
        (chunk,), outer = made[0], made[1]
        (inner,) = getattr(outer, "chained_optimizers", [outer])
        masters = [p for group in inner.optimizer.param_groups for p in group["params"]]
        states = [t for state in inner.optimizer.state.values() for t in state.values()]
        held = {
            "weights": size(chunk.parameters()),
            "gradients": size(buffer.grad_data for buffer in chunk.buffers),
            "optimizer": size([*masters, *(t for t in states if t.dim())]),
            "logits": logits.most,
        }
        (folder / str(dist.get_rank())).write_text(json.dumps(held))
        return log(*args, **kwargs)

    monkeypatch.setattr(training, "setup_model_and_optimizer", begin)
    monkeypatch.setattr(training, "training_log", end)


def assert_on_the_page(way: VocabularyParallel, figures: Sequence[Mapping[str, int]]) -> None:
    """Assert that docs/measurements.md has the bytes of the last rank."""
    page = " ".join((DOCS / "measurements.md").read_text().split())
    logits = figures[-1]["logits"]
    of_model = f"{(sum(figures[-1].values()) - logits) / 1e6:.1f} MB"
    if way is VocabularyParallel.NONE:
        assert f"take {of_model} on the first and the last rank" in page
        assert f"Logits take {logits / 1e6:.1f} MB on the last rank" in page
    else:
        assert f"with vocabulary parallelism {of_model} on every rank" in page
        assert f"with variant {way} {logits / 1e6:.1f} MB" in page


@pytest.mark.parametrize(
    ("way", "vocabulary"), each_once(VocabularyParallel, [64, 32, 128, *at_night(256)])
)
def test_what_each_rank_holds(
    vocabulary: int, way: VocabularyParallel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens = vocabulary * 1000
    is_divided = way is not VocabularyParallel.NONE
    rows = tokens // RANKS if is_divided else tokens
    count(monkeypatch, tmp_path, rows)
    words = model_flags(**FLAGS, vocab_size=tokens - 1, pipeline_vocab_parallel=way.value)
    train(RANKS, [*words, "--make-vocab-size-divisible-by", "8"])
    figures = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(RANKS)]
    for rank, held in enumerate(figures):
        held_by_model = sum(held.values()) - held["logits"]
        print(f"| {vocabulary}k | {way} | {rank} | {held_by_model} | {held['logits']} |")
    if vocabulary == 256:
        assert_on_the_page(way, figures)

    gpt = Described(RANKS, HIDDEN, 2, SEQUENCE, tokens)
    stages = stages_of(gpt.model, [1] * RANKS)
    expected = bytes_of_ranks(gpt.model, stages, gpt.execution(), line(RANKS), way, TrainingState())
    for held, bytes_ in zip(figures, expected, strict=True):
        assert (held["weights"], held["gradients"], held["optimizer"]) == (
            bytes_.weights,
            bytes_.gradients,
            bytes_.optimizer,
        )
    whole = SEQUENCE * rows * torch.float32.itemsize
    assert [held["logits"] >= whole for held in figures] == [is_divided] * (RANKS - 1) + [True]
    assert all(held["logits"] <= 3 * whole for held in figures)
