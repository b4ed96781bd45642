"""Tests of packed sequences outside the passes: which ranks build datasets, and how tokens are
counted."""

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
    """Return two values for a rank whose stage reads no data: whether it builds datasets, and
    whether its script gets datasets."""
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
    """With --dataloader-inter-document-masking, stages between the first and the last read
    documents too. Their iterators used to be None on all ranks but global rank 0, so trainings
    failed on a loop, and on a V of two ranks with data parallelism. 1F1B on two ranks has no such
    stages."""
    masked = {"inter_document_masking": True}
    assert built_and_given(monkeypatch, 2, 0, **masked) == (True, True)
    assert built_and_given(monkeypatch, 3, 1, **masked) == (False, False)
    assert built_and_given(monkeypatch, 2, 0, inter_document_masking=False) == (False, False)
    assert built_and_given(monkeypatch, 2, 0) == (False, False)  # Megatron 0.18 has no such setting


def test_global_rank_0_builds_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Global rank 0 builds datasets for the other ranks, but gets no loader if its stage reads
    nothing. It used to get one while its data-parallel peers had none, so the first collective of
    these ranks hung."""
    assert built_and_given(monkeypatch, 0, 0) == (True, False)
    assert built_and_given(monkeypatch, 0, 0, inter_document_masking=True) == (True, True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_builder_may_build_twice(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second build of datasets has the same result on global rank 0, whose stage reads no data.
    In the second build rank 0 used to count as a rank that reads data, and got a loader."""
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
    """The lengths of packed sequences count once on a rank with several chunks. Each chunk adds
    what its rank has read, so the logged TFLOP/s on a V used to be twice the real ones."""
    name = "get_virtual_pipeline_model_parallel_world_size"
    monkeypatch.setattr(parallel_state, name, lambda: chunks)
    with apply(packed_tokens.patches(PipelineConfig(schedule="zb-v"))):
        assert training.consume_seqlen_stats_in_iteration() == (None, None)
        for _ in range(chunks or 1):
            training.update_seqlen_stats_from_cu_seqlens(torch.tensor([0, 3, 8]))
        assert training.consume_seqlen_stats_in_iteration() == (8, 9 + 25)
