"""Packed sequences outside the passes: ranks build datasets and count tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import training

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.core.datasets.blended_megatron_dataset_builder import (
    build_where_read,
)
from megatron_ext.patches.megatron.training.training import packed_tokens


def built_and_given(
    monkeypatch: pytest.MonkeyPatch, rank: int, tensor_rank: int, **config: bool
) -> tuple[bool, bool]:
    """Whether a rank that reads nothing builds datasets, and whether its script gets them."""
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: tensor_rank)
    built: list[bool] = []

    def original(builder: Any) -> list[Any]:
        built.append(builder.is_built_on_rank())
        return ["train", ["one set", "another"], None]

    builder = SimpleNamespace(is_built_on_rank=lambda: False, config=SimpleNamespace(**config))
    datasets = build_where_read(original, builder)
    assert datasets in (["train", ["one set", "another"], None], [None, [None, None], None])
    return built[0], datasets[0] is not None


def test_stages_between_the_ends_have_documents_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --dataloader-inter-document-masking the stages between the ends need documents to read.
    Their iterators were None on all ranks but global rank 0: on a loop, and on a V of two ranks
    with data parallelism, where 1F1B on two ranks trains."""
    masked = {"inter_document_masking": True}
    assert built_and_given(monkeypatch, 2, 0, **masked) == (True, True)
    assert built_and_given(monkeypatch, 3, 1, **masked) == (False, False)
    assert built_and_given(monkeypatch, 2, 0, inter_document_masking=False) == (False, False)
    assert built_and_given(monkeypatch, 2, 0) == (False, False)  # Megatron 0.18


def test_global_rank_0_builds_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Global rank 0 builds datasets for other ranks. It got a loader for them, and its
    data-parallel peers got none, so the first collective of these ranks hung."""
    assert built_and_given(monkeypatch, 0, 0) == (True, False)
    assert built_and_given(monkeypatch, 0, 0, inter_document_masking=True) == (True, True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_builder_may_build_twice(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set builder may build twice. The second time global rank 0 was taken for a reader, and
    had a loader once more."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    builder = SimpleNamespace(is_built_on_rank=lambda: False, config=SimpleNamespace())

    def fail(builder: Any) -> list[Any]:
        raise OSError("no such file")

    if fails:
        with pytest.raises(OSError):
            build_where_read(fail, builder)
    else:
        assert build_where_read(lambda builder: ["train"], builder) == [None]
    assert build_where_read(lambda builder: ["train"], builder) == [None]


@pytest.mark.parametrize("chunks", [None, 2, 4])
def test_tokens_are_counted_once(chunks: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are counted once. TFLOP/s on a V were twice the real ones, since each chunk adds what
    its rank has read."""
    name = "get_virtual_pipeline_model_parallel_world_size"
    monkeypatch.setattr(parallel_state, name, lambda: chunks)
    with apply(packed_tokens.patches(PipelineConfig(schedule="zb-v"))):
        assert training.consume_seqlen_stats_in_iteration() == (None, None)
        for _ in range(chunks or 1):
            training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 3, 8]))
        assert training.consume_seqlen_stats_in_iteration() == (8, 9 + 25)
