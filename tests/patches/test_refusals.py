"""What schedules refuse, as docs/compatibility.md has it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_ext.schedule.build.registry import choose, entries
from megatron_ext.schedule.problem import Extras, Offload, Recompute, VocabularyParallel
from megatron_ext.schedule.slices import Slices
from tests.helpers.documents import check_written, table

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.refusals import (
    GRAPH_REFUSALS,
    OFFLOAD_REFUSALS,
    PAIRS_REFUSALS,
    POST_VALIDATION_REFUSALS,
    RECOMPUTE_REFUSALS,
    REFUSALS,
    SLICES_REFUSALS,
    VOCABULARY_REFUSALS,
    Refusal,
)
from megatron_ext.adapter.untried import UNTRIED


def who(refusal: Refusal) -> str:
    choices = {choose(name) for name in entries()}
    refusing = {choice for choice in choices if refusal.by(choice)}
    if refusing == choices:
        return "every schedule"
    if refusing == {choice for choice in choices if choice.traits.splits_backward}:
        return "those that split the backward"
    if refusing == {choice for choice in choices if choice.example.chunks == 1}:
        return "those with one stage on a rank"
    if refusing == {choice for choice in choices if choice.example.chunks > 1}:
        return "those with several stages on a rank"
    if refusing == {c for c in choices if c.example.rank_of[0] != c.example.rank_of[-1]}:
        return "all but V's and waves"
    assert refusing == {choice for choice in choices if choice.example.rank_of[0] != 0}
    return "V's and waves"


def test_the_docs_tell_what_is_refused() -> None:
    rows = [[f"`{refusal.setting}`", who(refusal), refusal.instead] for refusal in REFUSALS]
    check_written("refusals", table(["setting", "refused by", "because, or instead"], rows))


def test_the_docs_tell_what_is_untried() -> None:
    rows = [[f"`{entry.setting}`", entry.text] for entry in UNTRIED]
    check_written("untried", table(["setting", ""], rows))


def test_the_docs_tell_what_a_divided_vocabulary_refuses() -> None:
    rows = [[f"`{refusal.setting}`", refusal.instead] for refusal in VOCABULARY_REFUSALS]
    check_written("vocabulary refusals", table(["setting", "because, or instead"], rows))


def test_the_docs_tell_what_cuda_graphs_refuse() -> None:
    rows = [[f"`{refusal.setting}`", refusal.instead] for refusal in GRAPH_REFUSALS]
    check_written("graph refusals", table(["setting", "because, or instead"], rows))


def test_the_docs_tell_what_offload_refuses() -> None:
    rows = [[f"`{refusal.setting}`", refusal.instead] for refusal in OFFLOAD_REFUSALS]
    check_written("offload refusals", table(["setting", "because, or instead"], rows))


def test_the_docs_tell_what_recompute_refuses() -> None:
    rows = [[f"`{refusal.setting}`", refusal.instead] for refusal in RECOMPUTE_REFUSALS]
    check_written("recompute refusals", table(["setting", "because, or instead"], rows))


def test_the_docs_tell_what_slices_refuse() -> None:
    rows = [[f"`{refusal.setting}`", refusal.instead] for refusal in SLICES_REFUSALS]
    check_written("slices refusals", table(["setting", "because, or instead"], rows))


def test_the_docs_tell_what_pairs_refuse() -> None:
    rows = [[f"`{refusal.setting}`", refusal.instead] for refusal in PAIRS_REFUSALS]
    check_written("pairs refusals", table(["setting", "because, or instead"], rows))


def test_the_docs_tell_what_post_validation_refuses() -> None:
    names = [refusal.setting for refusal in POST_VALIDATION_REFUSALS]
    assert len(names) == len(set(names)), "refused twice"
    rows = [
        [f"`{refusal.setting}`", who(refusal), refusal.instead]
        for refusal in POST_VALIDATION_REFUSALS
    ]
    head = ["setting", "refused with", "because, or instead"]
    check_written("post-validation refusals", table(head, rows))


@pytest.mark.parametrize(
    "setting",
    [
        {"recompute_granularity": "full"},
        {"cuda_graph_impl": "transformer_engine"},
        {"fp8": "hybrid", "fp8_recipe": "delayed"},
        {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
        {"te_rng_tracker": True, "hidden_dropout": 0.1},
    ],
)
def test_recompute_refuses_what_cannot_run_again(setting: dict[str, object]) -> None:
    """Asked for by the flag, or by a file's passes; and nothing less."""
    settings = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "transformer_impl": "local",
    }
    choice = choose("1f1b")
    refuse(SimpleNamespace(**settings, **setting), choice)
    again = Extras(recompute=Recompute(first=1))
    for asked, extras in ((choice, again), (replace(choice, recomputes=True), Extras())):
        with pytest.raises(ValueError, match=r"^--pipeline-(recompute|schedule) .* does not go"):
            refuse(SimpleNamespace(**settings, **setting), asked, extras)
        harmless = {
            "recompute_granularity": "selective",
            "fp8_recipe": "delayed",  # Megatron's default, without FP8
            "moe_router_load_balancing_type": "aux_loss",
            "te_rng_tracker": True,
            "hidden_dropout": 0.0,
        }
        refuse(SimpleNamespace(**settings, **harmless), asked, extras)


UNTIED = {"untie_embeddings_and_output_weights": True}


@pytest.mark.parametrize(
    ("schedule", "setting"),
    [
        ("zb-h1", {"untie_embeddings_and_output_weights": False}),
        ("interleaved", {"untie_embeddings_and_output_weights": False}),
        ("zb-h1", {"calculate_per_token_loss": True} | UNTIED),
        ("zb-v", {"rerun_mode": "validate_results"}),
        ("zb-v", {"timing_log_level": 1, "barrier_with_L1_time": True}),
        ("zb-v", {"num_experts": 8}),
    ],
)
def test_post_validation_refuses_what_waits(schedule: str, setting: dict[str, object]) -> None:
    choice = choose(schedule)
    chunks = choice.place(2).chunks
    settings = SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        transformer_impl="local",
        **setting,
    )
    refuse(settings, choice)
    with pytest.raises(ValueError, match=r"^--pipeline-post-validation does not go with"):
        refuse(settings, choice, Extras(post_validation=True))


@pytest.mark.parametrize(
    "setting",
    [
        {"untie_embeddings_and_output_weights": False, "calculate_per_token_loss": True},
        {"timing_log_level": 1, "barrier_with_L1_time": False},
        {"timing_log_level": 0, "barrier_with_L1_time": True},
        {"rerun_mode": "disabled"},
    ],
)
def test_post_validation_takes_what_does_not_wait(setting: dict[str, object]) -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    settings = SimpleNamespace(**sizes, transformer_impl="local", **setting)
    refuse(settings, choose("zb-v"), Extras(post_validation=True))


def test_sequences_are_divided_beside_all_of_ours() -> None:
    """A divided vocabulary and offload refused it, as nobody had tried."""
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    settings = SimpleNamespace(**sizes, transformer_impl="local", context_parallel_size=2)
    for extras in (
        Extras(vocab_parallel=VocabularyParallel.ONE),
        Extras(vocab_parallel=VocabularyParallel.TWO, activation_offload=Offload.FULL),
        Extras(post_validation=True),
    ):
        refuse(settings, choose("zb-v"), extras)


def test_slices_of_ranks_that_share_sequences_look_no_further_ahead() -> None:
    """Context parallelism was refused, and so were repeated layers and experts made again."""
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
    sliced = Extras(slices=Slices(4))
    accepted: dict[str, object] = {
        "context_parallel_size": 2,
        "num_experts": 4,
        "recompute_granularity": "full",
    }
    ahead: dict[str, object] = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    choice = choose("1f1b")
    for given in (accepted, ahead):
        refuse(SimpleNamespace(**sizes, transformer_impl="local", **given), choice, sliced)
    both = SimpleNamespace(**sizes, transformer_impl="local", **accepted, **ahead)
    with pytest.raises(ValueError, match="with context parallelism the tokens that it looks"):
        refuse(both, choice, sliced)


@pytest.mark.parametrize("setting", [{"fp8": "hybrid"}])
def test_offload_refuses_what_nobody_has_tried(setting: dict[str, object]) -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
    settings = SimpleNamespace(**sizes, transformer_impl="local", **setting)
    refuse(settings, choose("zb-h1"))
    with pytest.raises(ValueError, match=r"^--pipeline-activation-offload full does not go with"):
        refuse(settings, choose("zb-h1"), Extras(activation_offload=Offload.FULL))


def test_a_v_refuses_other_formats_where_something_is_loaded_or_saved() -> None:
    """It was refused even where there is no checkpoint."""
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    settings = {**sizes, "transformer_impl": "local", "ckpt_format": "torch"}
    refuse(SimpleNamespace(**settings, load=None, save=None), choose("zb-v"))
    refuse(SimpleNamespace(**settings, load="here", save="here"), choose("interleaved"))
    for name in ("load", "save", "pretrained_checkpoint"):
        with pytest.raises(ValueError, match="add --load FOLDER --ckpt-convert-format torch_dist"):
            refuse(SimpleNamespace(**settings, **{name: "here"}), choose("zb-v"))
