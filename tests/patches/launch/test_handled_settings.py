"""Tests of Megatron settings whose work the schedule or its passes do, and which used to be
refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import arguments as training_arguments

from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.launch import script as launch
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.training import arguments
from megatron_ext.patches.megatron.training.arguments import parsing
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from tests.helpers.documents import check_written, table

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.transformer.module import MegatronModule

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.handled_settings import settings as handled_settings
from megatron_ext.adapter.handled_settings.microbatch_groups import with_megatrons_group
from megatron_ext.adapter.handled_settings.settings import HANDLED_SETTINGS, apply_handled_settings
from megatron_ext.patches.megatron.core.transformer import module, transformer_config
from megatron_ext.written_settings import for_megatrons_offload, given_in, words_of
from tests.helpers.callers import small_config

# For each setting of Megatron that we implement ourselves: settings of ours under which we do so,
# and whether the setting stays on in Megatron's config.
CASES: dict[str, tuple[dict[str, str], bool]] = {
    "defer_embedding_wgrad_compute": ({"schedule": "1f1b"}, False),
    "delay_wgrad_compute": ({"schedule": "zb-v"}, False),
    "overlap_moe_expert_parallel_comm": ({"schedule": "zb-v"}, True),
    "overlap_dispatch_backward_with_experts_wgrad": ({"schedule": "zb-v"}, False),
    "fine_grained_activation_offloading": (
        {"schedule": "zb-h1", "activation_offload": "half"},
        False,
    ),
    "cross_entropy_loss_fusion": ({"schedule": "zb-v", "vocab_parallel": "2"}, True),
    "tp_comm_overlap": ({"schedule": "zb-h1"}, True),
    "hidden_dropout": ({"schedule": "1f1b", "slices": "4"}, True),
    "attention_dropout": ({"schedule": "zb-v", "slices": "4"}, True),
}


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    handled_settings._tell.cache_clear()


def on(setting: str, config: PipelineConfig) -> Any:
    chunks = config.resolved_spec.place(2).chunks
    return SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        transformer_impl="local",
        **{setting: True},
    )


def test_the_docs_tell_what_is_taken_over() -> None:
    assert CASES.keys() == {entry.setting for entry in HANDLED_SETTINGS}
    rows = [[f"`{entry.setting}`", entry.text] for entry in HANDLED_SETTINGS]
    check_written("taken over", table(["setting", "what is done"], rows))


@pytest.mark.parametrize("setting", CASES)
def test_it_is_accepted_with_one_line(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, stays = CASES[setting]
    config = PipelineConfig.parse(**given)
    settings = on(setting, config)
    refuse(settings, config.resolved_spec, config.options)
    for _ in range(2):  # get_batch makes a config for each microbatch
        apply_handled_settings(settings, config)
        assert getattr(settings, setting) is stays
        settings = on(setting, config)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"megatron_ext: {setting}: ")


@pytest.mark.parametrize("setting", [setting for setting in CASES if "wgrad" not in setting])
def test_without_ours_it_stays_megatrons(setting: str) -> None:
    """Under plain 1f1b Megatron keeps its own fused loss, offload, overlaps and dropout. Only other
    schedules or features of ours, such as slices, handle these settings."""
    settings = on(setting, config := PipelineConfig.parse(schedule="1f1b"))
    apply_handled_settings(settings, config)
    assert getattr(settings, setting) is True


def test_megatrons_own_offload_without_ours_is_refused() -> None:
    config = PipelineConfig.parse(schedule="zb-h1")
    with pytest.raises(ValueError, match=r"write --pipeline-activation-offload full, or half"):
        refuse(
            on("fine_grained_activation_offloading", config), config.resolved_spec, config.options
        )


MEGATRONS = "--fine-grained-activation-offloading"
OURS = "--pipeline-activation-offload"


@pytest.mark.parametrize(
    ("words", "added"),
    [
        ("--pipeline-schedule zb-h1", []),
        (f"--pipeline-schedule zb-h1 {MEGATRONS}", [OURS, "full"]),
        (f"--pipeline-schedule zb-h1 --pipeline-memory-limit 4 {MEGATRONS}", [OURS, "fit"]),
        (f"--pipeline-schedule zb-h1 {MEGATRONS} {OURS} half", []),
        (f"--pipeline-schedule zb-h1 {MEGATRONS} {OURS}=none", []),
        (MEGATRONS, []),
    ],
)
def test_a_launch_has_ours_in_the_place_of_megatrons(words: str, added: list[str]) -> None:
    argv = words.split()
    assert words_of(for_megatrons_offload(argv, given_in(argv))) == added


def test_a_models_layers_are_built_without_it() -> None:
    """A model's layers are built without a setting that the schedule handles, here in a config of a
    caller without Megatron's arguments. Layers would otherwise defer weight gradients that no pass
    computes."""
    config = PipelineConfig.parse(schedule="1f1b")
    settings = on("overlap_dispatch_backward_with_experts_wgrad", config)
    with apply(module.patches(config)):
        built = MegatronModule(config=settings)
    assert built.config is settings
    assert not settings.overlap_dispatch_backward_with_experts_wgrad


@pytest.mark.parametrize("family", ["interleaved", "interleaved-zb"])
def test_the_group_of_microbatches_may_stand_in_the_config(family: str) -> None:
    settings = SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        transformer_impl="local",
        microbatch_group_size_per_vp_stage=4,
    )
    refuse(settings, choose(family))
    placement = choose(family).place(2)
    problem = Problem(placement, 8, uniform(placement, 1, 1, 1))
    grouped = with_megatrons_group(choose(family), settings).build(problem)
    assert grouped.rows == choose(f"{family}:group=4").build(problem).rows
    assert grouped.rows != choose(family).build(problem).rows


@pytest.mark.parametrize(
    ("spec", "group", "becomes"),
    [
        ("interleaved", None, "interleaved"),
        ("interleaved", 2, "interleaved"),  # Megatron replaces None by the number of ranks
        ("interleaved:vpp=3", 6, "interleaved:vpp=3,group=6"),
        ("interleaved:group=6", 6, "interleaved:group=6"),
        ("zb-v", 6, "zb-v"),  # a V has no groups of microbatches
        ("1f1b", 6, "1f1b"),
    ],
)
def test_which_schedules_take_the_group(spec: str, group: int | None, becomes: str) -> None:
    settings = SimpleNamespace(
        pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=group
    )
    assert with_megatrons_group(choose(spec), settings).spec == becomes


@pytest.mark.parametrize(
    ("spec", "given", "becomes"),
    [("zb-v", None, 1), ("zb-v", 4, 4), ("interleaved-zb", None, 2), ("zb-h1", None, 2)],
)
def test_a_v_has_groups_of_one_microbatch(spec: str, given: int | None, becomes: int) -> None:
    """Under a V schedule microbatch_group_size_per_vp_stage is 1 unless the user sets it. verl
    rounds a step's number of microbatches up to a multiple of that group, by default the number of
    ranks, so under a V it used to split each batch into needlessly many microbatches."""
    with apply(transformer_config.patches(PipelineConfig.parse(schedule=spec))):
        made = small_config(8, ranks=2, microbatch_group_size_per_vp_stage=given)
    assert made.microbatch_group_size_per_vp_stage == becomes


def test_routes_are_not_replayed_over_several_stages_of_a_rank() -> None:
    settings = SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        transformer_impl="local",
        moe_enable_routing_replay=True,
    )
    with pytest.raises(ValueError, match=r"interleaved schedule: drop --moe-enable-routing-replay"):
        refuse(settings, choose("zb-v"))
    settings.virtual_pipeline_model_parallel_size = None
    refuse(settings, choose("zb-h1"))


def test_two_groups_are_refused() -> None:
    settings = SimpleNamespace(pipeline_model_parallel_size=2, microbatch_group_size_per_vp_stage=4)
    with pytest.raises(ValueError, match=r"_vp_stage=4, Megatron's setting for the size"):
        with_megatrons_group(choose("interleaved:group=6"), settings)


def test_megatrons_parser_reads_what_a_launch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's parser gets the flags that a launch with a plan adds, so checkpoints keep them
    too. The flags used to be written into the script's ``sys.argv``, which now stays unchanged."""
    words = ["--num-layers", "4", "--seq-length", "16", "--micro-batch-size", "1"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    edited = parsing(lambda argv: [*launch.without(argv, ["--seq-length"]), "--pipeline-p2p", "x"])
    config = PipelineConfig.parse(schedule="zb-h1")
    with apply(arguments.patches(config)), apply(edited):
        args = training_arguments.parse_args()
        given = megatron_arguments.parse_arguments(words).args
    assert (args.num_layers, args.seq_length, args.pipeline_p2p) == (4, None, "x")
    assert (given.seq_length, given.pipeline_p2p) == (16, "async")
    assert sys.argv == ["train.py", *words]
