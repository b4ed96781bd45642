"""Tests of the settings that schedules refuse, compared with docs/compatibility.md."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_ext.compile.registry import ResolvedSpec, choose, entries
from megatron_ext.features.shared_prompts.adapter.refused_settings import REFUSED, REFUSED_LOSSES
from megatron_ext.schedule.problem import Offload, Recompute, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.slices import Slices
from tests.helpers.accepting import accepts
from tests.helpers.documents import check_written, table

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.handled_settings.refused_setting import (
    RefusalGroup,
    RefusedSetting,
    by_schedule,
)
from megatron_ext.adapter.refusals import REFUSALS
from megatron_ext.adapter.untried import UNTRIED


def who(refusal: RefusedSetting) -> str:
    choices = {choose(name) for name in entries()}
    refusing = {resolved for resolved in choices if refusal.by(resolved)}
    if refusing == choices:
        return "every schedule"
    if refusing == {resolved for resolved in choices if resolved.traits.splits_backward}:
        return "those that split the backward"
    if refusing == {resolved for resolved in choices if resolved.example.chunks == 1}:
        return "those with one stage on a rank"
    if refusing == {resolved for resolved in choices if resolved.example.chunks > 1}:
        return "those with several stages on a rank"
    if refusing == {c for c in choices if c.example.rank_of[0] != c.example.rank_of[-1]}:
        return "all but V's and waves"
    assert refusing == {resolved for resolved in choices if resolved.example.rank_of[0] != 0}
    return "V's and waves"


def listed(group: RefusalGroup) -> str:
    """Return the table of ``group`` in docs/compatibility.md: a row for each reason, with the
    settings that share it.

    A column names the schedules that refuse a setting, unless all do. It is empty in a row that all
    schedules refuse.
    """
    settings: dict[tuple[str, str], list[str]] = {}
    for refusal in group.refusals:
        refusing = who(refusal)
        reason = ("" if refusing == "every schedule" else refusing, refusal.remedy)
        settings.setdefault(reason, []).append(f"`{refusal.setting}`")
    settings = {reason: [*dict.fromkeys(names)] for reason, names in settings.items()}
    rows = [[", ".join(names), *reason] for reason, names in settings.items()]
    head = ["setting", "only under", "because, or instead"]
    if {schedules for schedules, _ in settings} == {""}:
        head, rows = [head[0], head[2]], [[row[0], row[2]] for row in rows]
    return table(head, rows)


@pytest.mark.parametrize("group", REFUSALS, ids=lambda group: group.name)
def test_the_docs_tell_what_is_refused(group: RefusalGroup) -> None:
    check_written(group.name, listed(group))


def test_the_docs_tell_what_shared_prompts_refuse() -> None:
    """The page of compatibility lists what shared prompts refuse. These refusals do not depend on
    the schedule, and no page used to list them."""
    refusals = (*REFUSED, *REFUSED_LOSSES)
    group = RefusalGroup("shared prompts refusals", refusals, by_schedule)
    check_written(group.name, listed(group))


def test_the_docs_tell_what_is_untried() -> None:
    rows = [[f"`{entry.setting}`", entry.text] for entry in UNTRIED]
    check_written("untried", table(["setting", ""], rows))


BESIDE: tuple[dict[str, object], ...] = (
    {},
    {"load": "folder"},
    {"hidden_dropout": 0.1},
    {"num_experts": 8},
    {"context_parallel_size": 2},
    {"sft": True},
    {"experimental_attention_variant": "dsa"},
    {"fp8": "hybrid"},
    {"transformer_impl": "local"},
)
VALUES = (2, "local", "full_iteration", "full", "transformer_engine", "delayed", "blockwise", "x")
LISTS = (["moe"], ["global_aux_loss"])


def refused(refusal: RefusedSetting, group: RefusalGroup) -> None:
    """Assert that the features of ``group`` refuse the setting of ``refusal``, under a schedule
    that does not refuse it by itself."""
    beside = next(given for given in BESIDE if refusal.matters(SimpleNamespace(**given)))
    value = next(value for value in (*LISTS, *VALUES, 0) if _is_unsupported(refusal, value))
    texts, wanted = set(), set()
    for resolved in filter(refusal.by, map(choose, ("1f1b", "zb-h1", "zb-v"))):
        chunks = resolved.example.chunks
        settings = {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
            "transformer_impl": "local",
            **group.settings,
            **beside,
        }
        if _text(settings, resolved, group) is None:
            settings[refusal.setting] = value
            texts.add(_text(settings, resolved, group))
            requested = group.requested(SimpleNamespace(**settings), resolved, group.options)
            end = f"does not go with {refusal.setting}={value}: {refusal.remedy}"
            wanted.add(f"{requested} {end}")
    assert texts & wanted


def _text(settings: dict[str, object], resolved: ResolvedSpec, group: RefusalGroup) -> str | None:
    try:
        refuse(SimpleNamespace(**settings), resolved, group.options)
    except ValueError as error:
        return str(error)
    return None


def _is_unsupported(refusal: RefusedSetting, value: object) -> bool:
    try:
        return refusal.unsupported(value)
    except TypeError:  # a word in place of a number
        return False


@pytest.mark.parametrize(
    ("group", "refusal"),
    [
        (group, refusal)
        for group in REFUSALS
        for refusal in group.refusals
        # This refusal meets only a caller's own optimizer: with the flag, every schedule is
        # refused.
        if (group.name, refusal.setting) != ("post-validation refusals", "use_megatron_fsdp")
    ],
    ids=lambda given: getattr(given, "name", getattr(given, "setting", None)),
)
def test_what_is_refused_says_what_to_write_instead(
    group: RefusalGroup, refusal: RefusedSetting
) -> None:
    refused(refusal, group)


@pytest.mark.parametrize("group", REFUSALS, ids=lambda group: group.name)
def test_no_feature_refuses_a_setting_twice(group: RefusalGroup) -> None:
    lines = [(refusal.setting, refusal.remedy) for refusal in group.refusals]
    assert len(lines) == len(set(lines))


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
def test_recompute_refuses_what_cannot_be_recomputed(setting: dict[str, object]) -> None:
    """Settings under which passes cannot be recomputed are refused, whether --pipeline-recompute or
    a schedule file brings the recompute. Harmless settings are accepted."""
    settings = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "transformer_impl": "local",
    }
    resolved = choose("1f1b")
    refuse(SimpleNamespace(**settings, **setting), resolved)
    again = ScheduleOptions(recompute=Recompute(first=1))
    for asked, options in (
        (resolved, again),
        (replace(resolved, recomputes=True), ScheduleOptions()),
    ):
        with pytest.raises(ValueError, match=r"^--pipeline-(recompute|schedule) .* does not go"):
            refuse(SimpleNamespace(**settings, **setting), asked, options)
        harmless = {
            "recompute_granularity": "selective",
            "fp8_recipe": "delayed",  # Megatron's default, which has no effect without FP8
            "moe_router_load_balancing_type": "aux_loss",
            "te_rng_tracker": True,
            "hidden_dropout": 0.0,
        }
        refuse(SimpleNamespace(**settings, **harmless), asked, options)


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
    resolved = choose(schedule)
    chunks = resolved.place(2).chunks
    settings = SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        transformer_impl="local",
        **setting,
    )
    refuse(settings, resolved)
    with pytest.raises(ValueError, match=r"^--pipeline-post-validation does not go with"):
        refuse(settings, resolved, ScheduleOptions(steps_overlap=True))


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
    assert accepts(refuse, settings, choose("zb-v"), ScheduleOptions(steps_overlap=True))
    settings.log_params_norm = True
    assert not accepts(refuse, settings, choose("zb-v"), ScheduleOptions(steps_overlap=True))


def test_context_parallelism_goes_with_our_features() -> None:
    """A split vocabulary, offload and post-validation accept context parallelism. They used to
    refuse it because it was untried."""
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    settings = SimpleNamespace(**sizes, transformer_impl="local", context_parallel_size=2)
    for options in (
        ScheduleOptions(vocab_parallel=VocabularyParallel.ONE),
        ScheduleOptions(vocab_parallel=VocabularyParallel.TWO, activation_offload=Offload.FULL),
        ScheduleOptions(steps_overlap=True),
    ):
        assert accepts(refuse, settings, choose("zb-v"), options)
        unsupported = SimpleNamespace(**vars(settings), hybrid_context_parallel=True)
        assert not accepts(refuse, unsupported, choose("zb-v"), options)


def test_slices_of_ranks_that_share_sequences_look_no_further_ahead() -> None:
    """Slices of a sequence accept context parallelism, experts and recompute, a combination that
    they used to refuse. They still refuse context parallelism with repeated layers of multi-token
    prediction."""
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
    sliced = ScheduleOptions(slices=Slices(4))
    accepted: dict[str, object] = {
        "context_parallel_size": 2,
        "num_experts": 4,
        "recompute_granularity": "full",
    }
    ahead: dict[str, object] = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
    resolved = choose("1f1b")
    for given in (accepted, ahead):
        refuse(SimpleNamespace(**sizes, transformer_impl="local", **given), resolved, sliced)
    both = SimpleNamespace(**sizes, transformer_impl="local", **accepted, **ahead)
    with pytest.raises(ValueError, match="with context parallelism the tokens that it looks"):
        refuse(both, resolved, sliced)


@pytest.mark.parametrize("setting", [{"fp8": "hybrid"}])
def test_offload_refuses_what_is_untried(setting: dict[str, object]) -> None:
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None}
    settings = SimpleNamespace(**sizes, transformer_impl="local", **setting)
    refuse(settings, choose("zb-h1"))
    with pytest.raises(ValueError, match=r"^--pipeline-activation-offload full does not go with"):
        refuse(settings, choose("zb-h1"), ScheduleOptions(activation_offload=Offload.FULL))


def test_a_v_refuses_other_formats_where_something_is_loaded_or_saved() -> None:
    """A V refuses checkpoint formats other than torch_dist only if the run loads or saves a
    checkpoint. It used to refuse them in every run."""
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    settings = {**sizes, "transformer_impl": "local", "ckpt_format": "torch"}
    refuse(SimpleNamespace(**settings, load=None, save=None), choose("zb-v"))
    refuse(SimpleNamespace(**settings, load="here", save="here"), choose("interleaved"))
    for name in ("load", "save", "pretrained_checkpoint"):
        with pytest.raises(ValueError, match="add --load FOLDER --ckpt-convert-format torch_dist"):
            refuse(SimpleNamespace(**settings, **{name: "here"}), choose("zb-v"))
