"""Test of entries of a checkpoint, other than tensors, for parameter groups that are empty on
global rank 0."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_ext.patches.megatron.core.optimizer.optimizer.saving import without_empty_groups


@pytest.mark.parametrize(
    ("groups", "is_loading", "expected"),
    [
        ([["norm"], []], False, {"fp32_from_fp16_params": [["norm"]]}),
        ([[], []], False, {}),
        ([["norm"], []], True, {"fp32_from_fp16_params": [["norm"], []]}),
    ],
)
def test_empty_groups_are_not_saved(
    groups: list[list[str]], is_loading: bool, expected: dict[str, Any]
) -> None:
    """Empty parameter groups are not saved, so that a checkpoint of a V with Muon or --decoupled-lr
    can be loaded. On global rank 0 of a V the embeddings' group is empty, and Megatron saves that
    rank's groups. An empty list cannot be loaded on the rank where the group has tensors."""

    def stock(optimizer: Any, model: Any, is_loading: bool) -> dict[str, Any]:
        return {"fp32_from_fp16_params": groups, "optimizer": {}}

    made = without_empty_groups(stock, None, {}, is_loading)
    assert made == {"optimizer": {}} | expected
