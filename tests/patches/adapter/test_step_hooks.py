"""Tests of the hooks by which features take part in a step: each part of a step comes from one
feature only, and each feature says whether it is on."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.adapter import arguments
from megatron_ext.adapter.features import FEATURES
from megatron_ext.adapter.step.pipeline_training import PipelineTraining
from megatron_ext.adapter.step.step_hooks import StepHooks, one_of
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.config import PipelineConfig
from megatron_ext.runtime.stage_passes import PassContext


class _First(StepHooks):
    context = PassContext()


class _Second(StepHooks):
    context = PassContext()


def test_two_features_that_give_the_same_part_are_named() -> None:
    given = _First(), StepHooks()
    assert one_of(given, lambda feature: feature.context) is _First.context
    assert one_of([StepHooks()], lambda feature: feature.context) is None
    with pytest.raises(AssertionError, match="_First and _Second give the same part"):
        one_of([_First(), _Second()], lambda feature: feature.context)


# For each feature: settings that switch on its hooks and no other feature's.
SETTINGS: dict[str, dict[str, str | bool]] = {
    "PostValidationHooks": {"post_validation": True},
    "SlicesHooks": {"slices": "2"},
    "OverlapHooks": {},
    "VocabularyHooks": {"vocab_parallel": "1"},
    "OffloadHooks": {"activation_offload": "half"},
    "LayerGraphsHooks": {},
    "WholeGraphHooks": {},
    "ArrangementHooks": {"microbatch_order": "small-ends"},
    "SharedPromptsHooks": {"shared_prompts": "exact"},
    "SplitReportHooks": {"report_split": True},
    "MetricsHooks": {"metrics": True},
    "TraceHooks": {"trace": "trace"},
    "ProfileHooks": {"costs": "profile"},
    "RaceHooks": {"race": "zb-h1"},
    "CopiedEmbeddingHooks": {},
    "MovedFirstStageHooks": {"schedule": "1f1b-v"},
}
MEGATRONS: dict[str, dict[str, object]] = {
    "OverlapHooks": {"overlap_moe_expert_parallel_comm": True},
    "LayerGraphsHooks": {"cuda_graph_impl": "transformer_engine"},
    "WholeGraphHooks": {"cuda_graph_impl": "full_iteration"},
    "CopiedEmbeddingHooks": {"mtp_num_layers": 1},
}


def test_every_feature_is_looked_at() -> None:
    assert [*SETTINGS] == [feature.__name__ for feature in FEATURES]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_turns_on_its_feature_alone(name: str) -> None:
    ours = PipelineConfig.parse(**{"schedule": "1f1b"} | SETTINGS[name])
    config = SimpleNamespace(**MEGATRONS.get(name, {}))
    assert [each.__name__ for each in FEATURES if each.is_on(ours, config)] == [name]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_feature_completes_and_checks_arguments_and_programs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feature's three functions that complete and check arguments and programs are called by the
    launch, `doctor` and `plan`."""
    called = []

    def noting(hook: str) -> Any:
        return classmethod(lambda cls, *given: called.append((cls.__name__, hook, given[-1])))

    for feature in FEATURES:
        for hook in ("complete_arguments", "check_arguments", "check_program"):
            monkeypatch.setattr(feature, hook, noting(hook))
    for name_of_check in ("check_settings", "refuse_order", "_check_evaluation"):
        monkeypatch.setattr(arguments, name_of_check, lambda *given: None)
    monkeypatch.setattr(
        arguments, "programs", lambda *given: [SimpleNamespace(schedule="schedule")]
    )
    ours = PipelineConfig.parse(**{"schedule": "1f1b"} | SETTINGS[name])
    args = SimpleNamespace(**MEGATRONS.get(name, {}))
    arguments.complete_arguments(args, ours)
    arguments.check_features(args, ours)
    (program,) = arguments.check_parsed_arguments(args, ours, arguments.prove_without_search)
    assert called == [
        (name, "complete_arguments", ours),
        (name, "check_arguments", ours),
        (name, "check_program", program),
    ]


def test_no_feature_is_on_by_itself() -> None:
    ours = PipelineConfig(schedule="1f1b")
    assert not [each for each in FEATURES if each.is_on(ours, SimpleNamespace())]


@pytest.mark.parametrize("feature", FEATURES)
def test_hooks_override_what_the_base_declares(feature: type[TrainingHooks]) -> None:
    own = {name for name in vars(feature) if not name.startswith("_")}
    assert own <= {*vars(TrainingHooks)}


def test_a_training_that_has_ended_holds_nothing_of_its_features() -> None:
    """A training that has ended keeps no references to its features. Host buffers and collectives
    used to stay alive in the hooks until the next training began."""
    training = PipelineTraining(PipelineConfig(schedule="1f1b"))
    hooks = TrainingHooks(PipelineConfig(schedule="1f1b"), training._programs)
    training._hooks[TrainingHooks] = hooks
    alive = weakref.ref(hooks)
    del hooks
    training.end()
    assert training.is_over
    assert alive() is None
