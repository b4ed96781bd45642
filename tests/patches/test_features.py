"""What schedules refuse, as docs/compatibility.md has it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_ext.schedule.registry import choose, entries
from megatron_ext.schedule.schedule import Offload
from tests.documents import check_written, table

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_ext.patches.features import (
    OFFLOAD_REFUSALS,
    REFUSALS,
    VOCABULARY_REFUSALS,
    Refusal,
    refuse,
)


def who(refusal: Refusal) -> str:
    choices = {choose(name) for name in entries()}
    refusing = {choice for choice in choices if refusal.by(choice)}
    if refusing == choices:
        return "every schedule"
    if refusing == {choice for choice in choices if choice.splits_backward}:
        return "those that split the backward"
    assert refusing == {choice for choice in choices if choice.example.rank_of[0] != 0}
    return "V's and waves"


def test_the_docs_tell_what_is_refused() -> None:
    rows = [[f"`{refusal.setting}`", who(refusal), refusal.instead] for refusal in REFUSALS]
    check_written("refusals", table(["setting", "refused by", "because, or instead"], rows))


def test_the_docs_tell_what_a_divided_vocabulary_refuses() -> None:
    rows = [[f"`{refusal.setting}`", refusal.instead] for refusal in VOCABULARY_REFUSALS]
    check_written("vocabulary refusals", table(["setting", "because, or instead"], rows))


def test_the_docs_tell_what_offload_refuses() -> None:
    rows = [[f"`{refusal.setting}`", refusal.instead] for refusal in OFFLOAD_REFUSALS]
    check_written("offload refusals", table(["setting", "because, or instead"], rows))


@pytest.mark.parametrize("setting", [{"fp8": "hybrid"}, {"context_parallel_size": 2}])
def test_offload_refuses_what_nobody_has_tried(setting: dict[str, object]) -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
    settings = SimpleNamespace(**sizes, transformer_impl="local", **setting)
    refuse(settings, choose("zb-h1"))
    with pytest.raises(ValueError, match=r"^--pipeline-activation-offload full does not go with"):
        refuse(settings, choose("zb-h1"), offload=Offload.FULL)
