"""Tests of `--pipeline-schedule plan`, which chooses a schedule for a launch command, without a
launch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.adapter.arguments import (
    Prove,
    check_parsed_arguments,
    search_for_first,
    settle_vocabulary,
)
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import Maturity, entries
from megatron_ext.config import PipelineConfig
from megatron_ext.cost_model.gpus import GPUS, RESERVED_SHARE, USABLE
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.doctor.launch_report import Finding, RankPrediction, Severity
from megatron_ext.launch.installation import install
from megatron_ext.launch.planner import launch_choice
from megatron_ext.launch.planner.launch_choice import choose_for
from megatron_ext.launch.script import Chosen, without
from megatron_ext.patches.engine import applied
from megatron_ext.planner.verdict import WORTH
from megatron_ext.written_settings import from_argv, from_environment
from tests.helpers.combinations import nightly
from tests.helpers.few_families import only_families
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.helpers.short_search import shorten_search

FLAGS: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "num_layers": 8,
    "global_batch_size": 4,
    "transformer_impl": "local",
    "pipeline_schedule": "plan",
}
LAYER_EACH: dict[str, Any] = {"num_layers": 2, "pipeline_vocab_parallel": "none"}
WIDE: dict[str, Any] = {  # sizes at which passes take longer than launching their kernels
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
}


def chosen(**overrides: object) -> tuple[list[str], Chosen]:
    words = model_flags(**(FLAGS | overrides))
    with megatron_arguments.on_gpus(megatron_arguments.parse_arguments(words).args):
        return words, choose_for(words, from_argv(words), 2)


def makespan(words: list[str], *more: str) -> float:
    """Return the makespan in seconds of the launch with the flags ``more``, by the program that a
    rank checks."""
    argv = [*words, *more]
    config = from_argv(argv)
    args = megatron_arguments.parse_arguments(argv).args
    with megatron_arguments.on_gpus(args):
        megatron_arguments.validate(args, config, 2)
        settle_vocabulary(args, config, megatron_arguments.count_tokens(args))
        (program,) = check_parsed_arguments(args, config, search_for_first)
    return simulate(program, program.problem.costs).makespan


def test_no_other_takes_less_time_in_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch)
    words, plan = chosen(pipeline_memory_limit="1x")
    assert "within --pipeline-memory-limit 1x" in plan.why
    assert "--pipeline-memory-limit" not in plan.flags, "it is in the command"
    least, compared = makespan(words, *plan.flags), 0
    for name in entries():
        for way in ("none", "1", "2"):
            flags = ("--pipeline-schedule", name, "--pipeline-vocab-parallel", way)
            try:
                other = makespan(words, *flags)
            except ValueError:
                continue
            compared += 1
            # a smaller gain is not worth a change
            assert other >= least * (1 - WORTH) * (1 - 1e-9), flags
    assert compared > 15


def test_refused_schedules_are_no_candidates() -> None:
    """`--pipeline-schedule plan` ignores schedules that the launch would refuse. Fused operations
    cannot be split, so only schedules with whole backward passes remain."""
    fused = {"transformer_impl": None, "use_transformer_engine_op_fuser": True}
    _, plan = chosen(**fused)
    whole = {name for name, entry in entries().items() if not entry.traits.splits_backward}
    assert plan.flags[1] in whole
    with pytest.raises(ValueError, match=r"finds no schedule .*: drop --use-ring-exchange-p2p"):
        chosen(use_ring_exchange_p2p=True)


def test_it_is_the_same_each_time_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, first = chosen(**LAYER_EACH)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert chosen(**LAYER_EACH)[1] == first
    assert "--pipeline-vocab-parallel" not in first.flags and not applied()


@pytest.mark.parametrize(("sequence", "tokens", "schedules"), [(256, 32000, 4), (1024, 8000, 5)])
def test_what_fits_in_the_memory_of_1f1b(sequence: int, tokens: int, schedules: int) -> None:
    """`--pipeline-schedule plan` takes a schedule that stores no more than 1F1B. 1F1B's first rank
    stores two activations; zb-h1's last rank stores one activation, the logits, and the inputs of a
    W. This fits once attention matrices, which no W needs, are larger than the logits. (Searches
    find no schedule with so late a W, and no other schedule is faster here.)"""
    lengths = {"seq_length": sequence, "max_position_embeddings": sequence}
    given = LAYER_EACH | WIDE | lengths | {"pipeline_recompute": "none"}
    _, plan = chosen(**given, vocab_size=tokens)
    assert plan.flags[:2] == ("--pipeline-schedule", "zb-auto")
    assert f"of {schedules} schedules in no more memory than 1f1b; zb-1p, " in plan.why


def test_a_choice_that_a_rank_would_refuse_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--pipeline-schedule plan` does not take a schedule that a rank would refuse at its start.
    The order of passes, for which Transformer Engine may refuse a schedule, is known only after its
    program has been built."""
    real, refused = launch_choice.check_schedule, chosen(**LAYER_EACH)[1].flags[1]

    def checked(args: Any, config: PipelineConfig, prove: Prove) -> object:
        if config.schedule == refused:
            raise ValueError("CUDA graphs would be captured in another order than the passes'")
        return real(args, config, prove)

    monkeypatch.setattr(launch_choice, "check_schedule", checked)
    assert refused not in chosen(**LAYER_EACH)[1].flags


def test_costs_without_bytes_are_held_to_microbatches() -> None:
    """If a costs file gives no bytes, `--pipeline-schedule plan` takes a schedule that stores no
    more microbatches than 1F1B."""
    _, plan = chosen(
        num_layers=2, pipeline_vocab_parallel="none", pipeline_costs="f=10,i=12,w=8,comm=1"
    )
    limit = plan.flags.index("--pipeline-memory-limit") + 1
    assert plan.flags[limit] == "1x"


def test_doctor_says_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = model_flags(**(FLAGS | {"num_layers": 2, "pipeline_vocab_parallel": "none"}))
    report = check_launch(Launch(str(SCRIPT), False, tuple(words)), 2, None)
    assert report.is_right, report.findings
    assert report.prediction is not None
    (plan,) = [finding.text for finding in report.findings if finding.subject == "plan"]
    assert plan.startswith(f"takes --pipeline-schedule {report.prediction.schedule} ")


def test_virtual_stages_of_the_command_go_where_a_schedule_has_others() -> None:
    """`--pipeline-schedule plan` drops the command's virtual stages if the chosen schedule has
    another number. A command with three chunks a rank used to be refused, because a V has two."""
    words, plan = chosen(num_layers=12, num_virtual_stages_per_pipeline_rank=3)
    assert plan.dropped == ("--num-virtual-stages-per-pipeline-rank",)
    left = without(words, plan.dropped)
    assert len(left) == len(words) - 2 and makespan(left, *plan.flags) > 0
    words, plan = chosen(num_layers=7, pipeline_model_parallel_layout="E|tt|tt|tt|t|L")
    assert plan.dropped == () and "--pipeline-model-parallel-layout" in plan.flags


def test_it_requires_a_launch_command() -> None:
    for config in (
        from_argv(["--pipeline-schedule", "plan"]),
        from_argv(["--pipeline-schedule", "auto"]),
        from_environment({"MEGATRON_EXT_SCHEDULE": "plan"}),
    ):
        with pytest.raises(
            ValueError, match=r"chosen for a launch command, .* the name of a schedule"
        ):
            install(config)
    with pytest.raises(ValueError, match="--use-checkpoint-args replace them"):
        chosen(use_checkpoint_args=True)


def test_auto_keeps_to_the_stages_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--pipeline-schedule auto` changes neither the number of chunks in the command nor its
    vocabulary."""
    shorten_search(monkeypatch)
    four = {"num_virtual_stages_per_pipeline_rank": 4}
    _, plan = chosen(pipeline_schedule="auto", **four)
    assert plan.flags[:2] in {
        ("--pipeline-schedule", name)
        for name in ("interleaved:vpp=4", "wave-auto", "loop-auto:vpp=4")
    }
    assert not plan.dropped and "--pipeline-vocab-parallel" not in plan.flags
    assert "of 3 schedules in no more memory than interleaved:vpp=4" in plan.why
    with pytest.raises(
        ValueError, match="auto:chunks=2 searches no schedule with 4 stages on each"
    ):
        chosen(pipeline_schedule="auto:chunks=2", **four)


def test_auto_says_what_it_has_omitted(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch)
    _, plan = chosen(pipeline_schedule="auto", pipeline_memory_limit="1.5")
    assert {"zb-auto", "v-auto", "wave-auto"} <= set(re.findall(r"[\w-]+auto", str(plan)))
    assert "within --pipeline-memory-limit 1.5" in plan.why and "; not compared: " in plan.why


def test_what_does_not_fit_is_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--pipeline-schedule plan` tries recompute if nothing fits without it. `plan -- COMMAND`
    proposed to recompute in bubbles, while this flag used to take a slower schedule without
    recompute."""
    only_families(monkeypatch, "1f1b", "zb-1p", "zb-h2")
    tight = {"pipeline_memory_limit": "0.625x", "pipeline_vocab_parallel": "none"}
    words, plan = chosen(**tight)
    fit = ("--pipeline-schedule", "zb-h2", "--pipeline-recompute", "fit")
    assert plan.flags == fit and "0.625x, 50% recomputed in bubbles" in plan.why
    seconds = makespan(words, *plan.flags)
    full = {"granularity": "full", "method": "uniform", "num_layers": 1}
    for said in ({"pipeline_recompute": "none"}, {f"recompute_{k}": v for k, v in full.items()}):
        words, plan = chosen(**tight, **said)
        assert plan.flags == ("--pipeline-schedule", "zb-1p")
        assert makespan(words, *plan.flags) > seconds


EXPERTS: dict[str, Any] = {
    "num_layers": 8,
    "num_experts": 8,
    "moe_layer_freq": "[0,0,1,1,1,1,1,1]",
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "disable_bias_linear": True,
    "pipeline_model_parallel_size": 4,
    "global_batch_size": 8,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "pipeline_vocab_parallel": "none",
}


def memory_of(
    schedule: str, memory: float | None = None, **overrides: object
) -> tuple[list[RankPrediction], list[Finding]]:
    """Return the memory of each rank in doctor's table, and doctor's findings."""
    words = model_flags(**(FLAGS | EXPERTS | overrides | {"pipeline_schedule": schedule}))
    gpu = None if memory is None else replace(GPUS["h100"], memory=memory)
    report = check_launch(Launch(str(SCRIPT), False, tuple(words)), 4, gpu)
    assert report.prediction is not None, report.findings
    return list(report.prediction.ranks), report.findings


def fullest(
    schedule: str, memory: float | None = None, **overrides: object
) -> tuple[float, list[Finding]]:
    """Return the bytes of the fullest rank in doctor's table, and doctor's findings."""
    ranks, findings = memory_of(schedule, memory, **overrides)
    return max(rank.total_bytes for rank in ranks), findings


def finding_on(subject: str, findings: list[Finding]) -> Finding:
    (finding,) = [finding for finding in findings if finding.subject == subject]
    return finding


def test_no_more_than_1f1b_by_the_table_that_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--pipeline-schedule plan` compares the memory of schedules by the estimates that `doctor`
    prints. The choice used to count experts as one dense layer, and doctor's table did not: the
    choice said that the schedule gis takes no more memory than 1f1b, where the table had 131 GiB
    for gis and 95.5 GiB for 1f1b."""
    shorten_search(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    taken, findings = fullest("plan")
    assert "in no more memory than 1f1b" in finding_on("plan", findings).text
    assert taken <= fullest("1f1b")[0]


def test_a_choice_leaves_room_for_the_allocators_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--pipeline-schedule plan` and `doctor` reserve memory for the GPU's allocator. Only ``plan
    -- COMMAND`` used to do so, and doctor compared with the GPU's whole memory. On this GPU 1f1b
    fits only if its allocator reserves nothing."""
    shorten_search(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ranks, _ = memory_of("1f1b")
    lasting = min(rank.model_bytes + rank.context_bytes for rank in ranks)
    assert all(rank.temporary_bytes > 0 for rank in ranks) and lasting > 0.66e9
    of_1f1b = max(rank.total_bytes for rank in ranks)
    reserved = RESERVED_SHARE * (of_1f1b - lasting)
    tight, enough = ((of_1f1b + share * reserved) / USABLE for share in (0.5, 1.001))
    for gpu, judged in ((tight, Severity.WRONG), (enough, Severity.RIGHT)):
        assert finding_on("memory", fullest("1f1b", gpu)[1]).verdict is judged
    taken, findings = fullest("plan", tight)
    usable = of_1f1b + 0.5 * reserved
    assert taken + RESERVED_SHARE * (taken - lasting) <= usable + 2**14
    assert "in addition to which its allocator reserves" in finding_on("plan", findings).text


@nightly("by day a limit is honoured")
def test_choice_honours_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--pipeline-schedule plan` chooses a schedule that fits into the GPU's memory. The model is
    large, so that it matters which rank has which weights: the memory of a small model is nearly
    all CUDA's own, which no schedule reduces."""
    shorten_search(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    of_1f1b, _ = fullest("1f1b", **WIDE)
    gpu = 0.95 * of_1f1b / USABLE
    taken, findings = fullest("plan", gpu, **WIDE)
    assert taken <= USABLE * gpu
    assert "of a GPU's" in finding_on("plan", findings).text
    assert finding_on("memory", findings).verdict is Severity.RIGHT
    taken, findings = fullest("plan", 2**20, **WIDE)
    assert "none is predicted to fit" in finding_on("plan", findings).text
    assert finding_on("memory", findings).verdict is Severity.WRONG and taken <= of_1f1b


def test_flag_that_hides_a_better_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--pipeline-schedule plan` names a flag that prevents a better schedule. Some flags that save
    a little time restrict the choice to schedules with whole backward passes, which are slower; no
    message used to say so."""
    shorten_search(monkeypatch)
    only_families(monkeypatch, "1f1b", "interleaved", "zb-h1", "zb-v")
    _, whole = chosen(**WIDE, use_transformer_engine_op_fuser=True)
    assert not entries()[whole.flags[1]].traits.splits_backward
    hidden = whole.why.partition("Without --use-transformer-engine-op-fuser: ")[2]
    assert "zb-" in hidden and " shorter (bubble " in hidden
    _, plain = chosen(**WIDE)
    assert entries()[plain.flags[1]].traits.splits_backward and "Without" not in plain.why


def test_the_schedule_of_the_command_is_a_candidate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`--pipeline-schedule plan` also considers the schedule that the command has. A launch with
    virtual stages used to get a slower schedule than its own: candidates had to use no more memory
    than 1F1B, and interleaved uses more."""
    shorten_search(monkeypatch)
    only_families(monkeypatch, "1f1b", "interleaved", "zb-1p")
    stages = WIDE | {"num_virtual_stages_per_pipeline_rank": 4, "pipeline_vocab_parallel": "none"}
    words, plan = chosen(**stages)
    own = makespan(words, "--pipeline-schedule", "interleaved:vpp=4")
    taken = makespan([*without(words, plan.dropped)], *plan.flags)
    assert "interleaved:vpp=4" in plan.why
    assert taken <= (1 - WORTH) * own or plan.flags[1] == "interleaved:vpp=4"
    only_families(monkeypatch, "1f1b", "interleaved")
    _, plan = chosen(**stages)
    assert plan.flags[1] == "interleaved:vpp=4" and not plan.dropped
    assert plan.why.startswith("it is kept: of 2 schedules")


@nightly("tests/unit asks the same of plan without a launch")
def test_only_stable_schedules_are_chosen() -> None:
    _, plan = chosen(pipeline_memory_limit="8")
    assert entries()[plan.flags[1]].maturity is Maturity.STABLE
    number = int(re.search(r"of (\d+) schedules", plan.why)[1])  # type: ignore[index]
    assert number <= sum(entry.maturity is Maturity.STABLE for entry in entries().values())
