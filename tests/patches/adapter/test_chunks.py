"""Tests of the lists of data loaders and validation sets on a rank with several model chunks."""

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
    """A chunk that reads no data has as many validation sets as the other chunks. The data provider
    returns None three times on a rank without data, and Megatron takes this for one set."""
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
    """--eval-iters keeps its given value until each chunk has computed the size of its test set
    from it. Then it is set to the lengths of the validation sets, also on a rank that reads none of
    them. Megatron sets it after each chunk, so later chunks would have test sets of other sizes."""
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
