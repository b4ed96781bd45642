"""Tests of layouts that `plan` proposes for a launch command: their gains, and that Megatron
accepts them."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.adapter.arguments import check_settings
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.gpus import parse_gpu
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.planner.alternatives.layouts import lay_out, work_of, written_of
from megatron_ext.launch.planner.alternatives.recompute import recompute_of_launch
from megatron_ext.launch.planner.alternatives.written import layout_of_variant
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, ParsedLaunch, with_launch
from megatron_ext.launch.script import without
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.figures import as_data
from megatron_ext.planner.layouts.comparison import LayoutComparison
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.minimax import least_slowest_stage
from megatron_ext.planner.layouts.stage_figures import End, StageFigures, busy
from megatron_ext.planner.layouts.work import Work
from megatron_ext.planner.verdict import Written
from megatron_ext.written_settings import from_argv
from tests.helpers.combinations import at_night
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.helpers.ranks import ROOT
from tests.patches.launch.test_one_judgement import plan_of

FLAGS: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "num_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "use_distributed_optimizer": True,
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
    "padded_vocab_size": 64000,
    "vocab_size": 63999,
}
LAUNCHES: dict[str, dict[str, Any]] = {
    "even": {},
    "virtual stages": {"num_virtual_stages_per_pipeline_rank": 4},
    "ends": {"decoder_first_pipeline_num_layers": 5},
    "layout": {"num_layers": 7, "pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|L"},
    "depths": {"mtp_num_layers": 1, "position_embedding_type": "rope"},
    "depths before the loss": {
        "pipeline_model_parallel_size": 4,
        "mtp_num_layers": 1,
        "position_embedding_type": "rope",
        "pipeline_model_parallel_layout": "Et*6|t|tm|L",
        "padded_vocab_size": 8000,
        "vocab_size": 7999,
    },
    "full recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "its old name": {"recompute_activations": True, "transformer_impl": "local"},
    "pattern": {
        "num_layers": None,
        "hybrid_layer_pattern": "*-*-|*-*-",
        "position_embedding_type": "none",
    },
}
ROUTED: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 1024,
    "expert_model_parallel_size": 2,
    "swiglu": True,
    "add_bias_linear": False,
}
BY_DAY = ("virtual stages", "depths", "pattern", "full recompute")
WORLD = 4


@pytest.mark.parametrize(
    ("layers", "ranks", "depths"),
    [
        ((5, 6, 6, 6, 6, 6, 6, 3), 8, 1),
        ((1, *[2] * 14, 1), 4, 0),
        ((4, 5, 5, 5, 5, 5, 5, 0), 4, 2),
        ((12, 11, 10, 3), 4, 0),
    ],
)
def test_megatron_reads_what_is_printed(layers: tuple[int, ...], ranks: int, depths: int) -> None:
    layout = Layout(layers)
    read = PipelineParallelLayerLayout.from_str(layout.text(depths), ranks)
    read.validate_layer_layout(sum(layers), depths)
    counts = [
        read.layout[stage % ranks][stage // ranks].count(LayerType.decoder)
        for stage in range(len(layers))
    ]
    assert counts == list(layers)
    assert read.layout[-1][-1].count(LayerType.mtp) == depths


def _laid_out(read: ParsedLaunch) -> tuple[LayoutComparison, tuple[Written, ...]]:
    variants = read.variants
    made = lay_out(
        variants, read.validated, str(variants.launch_schedule), read.allowed_bytes, search=False
    )
    return made, tuple(written_of(variants, made.baseline, other) for other in made.others.values())


@functools.cache
def laid_out(name: str) -> tuple[LayoutComparison, tuple[Written, ...]]:
    """Return the compared layouts of a launch, and the flags that are written for each."""
    launch = Launch(str(SCRIPT), False, words_of(name), world_size=WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        return with_launch(LaunchRequest(launch, gpu=parse_gpu("h100")), _laid_out)


def words_of(name: str) -> tuple[str, ...]:
    return tuple(model_flags(**{**FLAGS, **LAUNCHES[name]}))


@pytest.mark.parametrize("name", [*BY_DAY, *at_night(*(n for n in LAUNCHES if n not in BY_DAY))])
def test_a_launch_takes_what_is_written_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's validation, its model config and our checks accept the layouts that `plan` writes
    for a launch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made, all_written = laid_out(name)
    for other, written in zip(made.others.values(), all_written, strict=True):
        words = [*without(words_of(name), written.dropped), *written.added]
        args, config = megatron_arguments.parse_arguments(words).args, from_argv(words)
        with megatron_arguments.on_gpus(args):
            megatron_arguments.validate(args, config, WORLD)
            megatron_arguments.check_model(args, config)
            if config.schedule is not None:
                check_settings(args, config)
        chunks = args.virtual_pipeline_model_parallel_size or 1
        assert chunks == other.candidate.report.vpp
        assert config.schedule in (None, other.schedule)


def test_a_launch_is_compared_as_its_layout_has_multi_token_prediction() -> None:
    """`plan` estimates a launch with multi-token prediction on the stage that its layout names. A
    launch with multi-token prediction before the last stage used to be estimated as if it were on
    the last one, with wrong bytes and seconds."""
    name = "depths before the loss"
    made, all_written = laid_out(name)
    assert made.baseline.layout.text() == LAUNCHES[name]["pipeline_model_parallel_layout"]
    as_it_is = plan_of(Launch(str(SCRIPT), False, words_of(name), world_size=WORLD))
    assert made.baseline.rank_bytes == pytest.approx(as_it_is.ranks)
    changed = [
        (other.layout, written)
        for other, written in zip(made.others.values(), all_written, strict=True)
        if other is not made.baseline
    ]
    assert changed
    for layout, written in changed:
        assert (
            sum(layout.depths) in (0, 1) and "--pipeline-model-parallel-layout" in written.dropped
        )


def test_another_schedule_keeps_multi_token_prediction_where_the_launch_has_it() -> None:
    """`plan` estimates another schedule with multi-token prediction on the stage of the launch's
    layout, and the command that it writes keeps it there. That command used to move multi-token
    prediction to the last stage."""
    name = "depths before the loss"
    launch = Launch(str(SCRIPT), False, words_of(name), world_size=WORLD)

    def layout(read: ParsedLaunch) -> Layout:
        made = SimpleNamespace(schedule="zb-h1", method=VocabMethod.NAIVE)
        made.variant = read.variants.variant(made.schedule, made.method)
        return layout_of_variant(read.variants, cast(Any, made))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        kept = with_launch(LaunchRequest(launch, gpu=parse_gpu("h100")), layout)
    assert kept.text() == LAUNCHES[name]["pipeline_model_parallel_layout"]


def test_deepseek_v3_on_16_ranks_is_as_even_as_whole_layers_allow() -> None:
    """`plan` finds even layouts for DeepSeek-V3 on 16 ranks.

    On a linear placement every stage takes nearly the mean time. On a V every rank does, if
    multi-token prediction is on another stage than the output layer; with the two on one stage, the
    last rank takes 17 % more than the mean. The single stages of a V cannot all be near the mean.
    Three layers on a stage take too long, and so does a stage that has a layer with multi-token
    prediction, or multi-token prediction with the output layer. So 30 of the 32 stages would have
    two layers each, and one of the 61 layers would be left.
    """
    text = (ROOT / "docs" / "planning.md").read_text()
    flags = dict(re.findall(r'^(DEEPSEEK|RUN)="([^"]*)"', text, re.MULTILINE))
    words = f"{flags['DEEPSEEK']} {flags['RUN']} --pipeline-model-parallel-size 16".split()
    at = words.index("--pipeline-model-parallel-layout")
    words[at + 1] = "Ettt|(tt|)*29m|L"
    launch = Launch(str(SCRIPT), False, tuple(words), world_size=256)

    def slowest(work: Work, schedule: str, separates: bool) -> tuple[float, float, float]:
        """Return the seconds of the slowest stage and of the slowest rank, relative to the mean,
        and the mean of the stages."""
        figures = StageFigures(work, separates_prediction=separates)
        placement = choose(schedule).place(16)
        layout = least_slowest_stage(61, placement, figures)
        seconds = busy(figures.of(np.array([layout.layers]), placement))[0]
        ranks = [sum(seconds[stage] for stage in stages) for stages in placement.stages_of]
        mean = float(np.mean(seconds))
        return float(max(seconds)) / mean, float(max(ranks) / np.mean(ranks)), mean

    def figures_of(read: ParsedLaunch) -> tuple[list[tuple[float, float, float]], list[float]]:
        work = work_of(read.validated)
        cases = ("zb-h1", False), ("zb-v", True), ("zb-v", False)
        apart, together = StageFigures(work, separates_prediction=True), StageFigures(work)
        stages = [
            apart.piece(0, 3),  # layers without experts, the lightest
            apart.piece(60, 61, behind=End.PREDICTION),
            together.piece(61, 61, behind=End.LOSS),
        ]
        return [slowest(work, *case) for case in cases], [float(busy(stage)) for stage in stages]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        request = LaunchRequest(launch, gpu=parse_gpu("b300"))
        (line, apart, together), too_long = with_launch(request, figures_of)
    assert line[0] <= 1.03
    assert apart[1] <= 1.03 < together[1]
    assert apart[0] == pytest.approx(min(too_long) / apart[2]) and apart[0] > 1.03


def test_recompute_is_chosen_together_with_the_layout() -> None:
    """`plan` chooses recompute together with the layout. The launch recomputes everything, and its
    small model needs no recompute."""
    made, all_written = laid_out("full recompute")
    assert str(made.baseline.recompute) == "full"
    assert {str(other.recompute) for other in made.others.values()} == {"none"}
    flags = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")
    for written in all_written:
        assert set(flags) <= set(written.dropped) and not set(flags) & set(written.added)
    assert as_data(made)["baseline"]["recompute"]["granularity"] == "full"


def test_what_the_launch_cannot_recompute_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` proposes no recompute that Megatron refuses: of experts' activations without grouped
    GEMMs, or full recompute together with the overlap of experts' messages."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def options(**flags: object) -> list[str]:
        words = tuple(model_flags(**{**FLAGS, **ROUTED, **flags}))
        asked = LaunchRequest(
            Launch(str(SCRIPT), False, words, world_size=WORLD), gpu=parse_gpu("h100")
        )
        offered = with_launch(
            asked, lambda read: recompute_of_launch(read.variants, read.validated)
        )
        return [str(option) for option in offered]

    plain = options()
    assert plain[0] == "none" and plain[-1] == "full" and not any("moe_act" in o for o in plain)
    assert any("moe_act" in option for option in options(moe_grouped_gemm=True))
    overlapped = options(
        overlap_moe_expert_parallel_comm=True,
        moe_token_dispatcher_type="alltoall",
        num_virtual_stages_per_pipeline_rank=4,
    )
    assert "full" not in overlapped and not any("moe" in o.split() for o in overlapped)


def test_layouts_gain() -> None:
    made, all_written = laid_out("virtual stages")
    assert made.gain(made.ours) > 0.02
    told = as_data(made)
    assert told["ours"]["seconds"] <= told["stock"]["seconds"] <= told["chunks"]["seconds"]
    assert all_written[-1].added and sum(told["ours"]["layout"]["layers"]) == 8
    assert Written((), ("--num-virtual-stages-per-pipeline-rank",)) in all_written
