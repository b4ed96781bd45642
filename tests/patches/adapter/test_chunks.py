"""Megatron's lists of a rank's loaders and of its validation sets under several chunks."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")


from megatron_ext.patches.megatron.training.training import chunks, loaders


def test_a_chunk_that_reads_nothing_has_as_many_sets_as_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chunk without data has as many validation sets as the others. The data provider gives a
    rank without data three times None, which Megatron takes for one set."""
    monkeypatch.setattr(chunks, "get_args", lambda: SimpleNamespace(eval_iters=[3, 5]))
    given: list[Any] = []

    def original(prefix: str, step: Any, data_iterator: Any, *rest: Any) -> None:
        given.append(data_iterator)

    for iterators in ([None, ["a", "b"]], [[None], ["a", "b"]], [[None, None], ["a", "b"]]):
        chunks.evaluate_by_sets(original, "", None, iterators, "model")
        assert given.pop() == [[None, "a"], [None, "b"]]
    chunks.evaluate_by_sets(original, "", None, "no list", "model")
    assert given.pop() == "no list"
    monkeypatch.setattr(chunks, "get_args", lambda: SimpleNamespace(eval_iters=3))
    chunks.evaluate_by_sets(original, "", None, [None, "a"], "model")
    assert given.pop() == [None, "a"], "the chunks of one set"


@pytest.mark.parametrize("reads", [False, True])
def test_validation_sets_are_as_long_as_where_they_are_read(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk counts the samples of its test set from the flag --eval-iters. Once the last chunk
    had its loaders, the lengths of the validation sets replaced that setting."""
    args = SimpleNamespace(
        eval_iters=7,
        full_validation=True,
        multiple_validation_sets=True,
        virtual_pipeline_model_parallel_size=2,
    )

    def with_another_rank(here: list[int]) -> list[int]:
        other = [2] if len(here) == 1 else [4, 4]
        return [max(pair) for pair in zip(here, other, strict=True)]

    monkeypatch.setattr(loaders, "get_args", lambda: args)
    monkeypatch.setattr(loaders, "_largest", with_another_rank)
    flags: list[object] = []

    def original(provider: Any) -> Any:
        flags.append(args.eval_iters)
        args.eval_iters = [3, 5] if reads else [None]
        return None, (["a", "b"] if reads else [None]), None

    for chunk in range(2):
        loaders.agree_on_lengths(original, partial(print, vp_stage=chunk))
    assert flags == [7, 7]
    assert args.eval_iters == ([4, 5] if reads else [4, 4])
