"""Tests of requests that a schedule cannot honour: one line ends the launch before any process
group exists.

Each case starts a single rank of a world of four. If that rank came as far as making process
groups, it would wait for the other three.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import pytest

from megatron_ext.__main__ import main
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.helpers.ranks import run_ranks

CASES: dict[str, tuple[dict[str, object], str]] = {
    "memory limit": (
        {"pipeline_memory_limit": "3"},
        "0F3 brings rank 0 over the memory limit of 3 microbatches: the schedule's peak there is 4",
    ),
    "memory limit, for a batch that comes later": (
        {
            "pipeline_memory_limit": "3",
            "global_batch_size": None,
            "step_batch_size_schedule": "0:2 16:8",
        },
        "brings rank 0 over the memory limit of 3 microbatches: the schedule's peak there is 4",
    ),
    "bytes": ({"pipeline_memory_limit": "0.00001GiB"}, "over the memory limit of 10.5KiB"),
    "bytes without bytes": (
        {"pipeline_memory_limit": "1GiB", "pipeline_costs": "f=1,i=1,w=1"},
        "have no bytes",
    ),
    "a limit below one microbatch, for a search": (
        {
            "pipeline_schedule": "zb-auto",
            "pipeline_memory_limit": "0.6x",
            "global_batch_size": 1,
        },
        "the memory limit is 0.6 microbatches, and every rank holds at least one microbatch: give "
        "at least 1 microbatch",
    ),
    "limit not understood": ({"pipeline_memory_limit": "much"}, "'much' is not understood"),
    "costs not understood": ({"pipeline_costs": "f=1,i=x,w=1"}, "'i=x' has no number"),
    "no pipeline": (
        {"pipeline_model_parallel_size": 1},
        "needs a pipeline, but --pipeline-model-parallel-size is 1",
    ),
    "virtual stages": (
        {"num_layers": 8, "num_layers_per_virtual_pipeline_stage": 1},
        "puts 1 stage on each rank, and Megatron's virtual-stage flags or the layout set 2",
    ),
    "virtual stages of a loop": (
        {
            "pipeline_schedule": "interleaved",
            "num_layers": 12,
            "num_layers_per_virtual_pipeline_stage": 1,
        },
        "set 3: remove the flags, which the schedule does not need, or give the layout 8 "
        "stages; or write interleaved:vpp=3",
    ),
    "segments of a hybrid model": (
        {"pipeline_schedule": "zb-v", "num_layers": None, "hybrid_layer_pattern": "*-|*-|*-|*-"},
        "the hybrid layer pattern *-|*-|*-|*- has 4 pipeline segments, and schedule zb-v has 8 "
        "stages on 4 pipeline ranks: give the pattern 8 segments, as in --hybrid-layer-pattern "
        "'*|-|*|-|*|-|*|-'",
    ),
    "a hybrid model, uneven": (
        {
            "pipeline_schedule": "interleaved",
            "num_layers": None,
            "hybrid_layer_pattern": "*-*-*-*-",
            "decoder_first_pipeline_num_layers": 1,
        },
        "drop --decoder-first-pipeline-num-layers, and mark the ends of stages by |, as in "
        "--hybrid-layer-pattern '*|-|*|-|*|-|*|-'",
    ),
    "a race with one that needs more memory": (
        {"pipeline_race": "gpipe", "pipeline_memory_limit": "4"},
        "--pipeline-race: gpipe cannot race: schedule gpipe is invalid: 0F4 brings rank 0 over",
    ),
    "a race across placements": (
        {"pipeline_race": "zb-v"},
        "zb-h1 has the placement line with 1 stage on a rank and zb-v has the placement v with 2",
    ),
    "layers that do not divide": (
        {"pipeline_schedule": "zb-v", "num_layers": 12},
        "12 layers cannot be split evenly over 8 stages; give each stage's layers in a layout: "
        "--pipeline-model-parallel-layout 'Ett|tt|tt|tt|t|t|t|tL'",
    ),
    "a layout for another number of stages": (
        {"pipeline_schedule": "zb-v", "pipeline_model_parallel_layout": "Et|t|t|tL"},
        "the layout Et|t|t|tL has 4 stages, and schedule zb-v has 8 on 4 pipeline ranks",
    ),
    "a layout with a layer too few": (
        {"pipeline_model_parallel_layout": "Et|t|t|L"},
        "--pipeline-model-parallel-layout Et|t|t|L: Number of decoder layers 3must match "
        "num_layers 4",
    ),
    "no layer in zero has experts": (
        {"num_experts": 4, "moe_layer_freq": 0},
        "--moe-layer-freq 0: a frequency of N means one layer in every N",
    ),
    "masks of documents on stages that get none": (
        {
            "pipeline_schedule": "interleaved",
            "num_layers": 8,
            "reset_attention_mask": True,
        },
        "--pipeline-schedule interleaved does not go with reset_attention_mask=True: layers apply "
        "the mask, which scripts give to the first and the last stage only",
    ),
    "sequences of no token": (
        {"seq_length": 0},
        "--seq-length 0: there must be at least one; write 1 or more",
    ),
    "no layers": ({"num_layers": 0}, "--num-layers 0: there must be at least one"),
    "checkpoints that stay where they are": (
        {"pipeline_schedule": "zb-v", "num_layers": 8, "ckpt_format": "torch", "load": "here"},
        "a rank's stages are others than stock's: to load or save, write --ckpt-format torch_dist",
    ),
    "an iteration to trace that will not come": (
        {"pipeline_trace": "/dev/null/no", "pipeline_trace_iters": "5:7", "train_iters": 5},
        "--pipeline-trace-iters 5:7 includes iteration 6, and the last iteration is 5",
    ),
    "a trace that cannot be written": (
        {"pipeline_trace": "/dev/null/no", "pipeline_trace_iters": "5:6"},
        "--pipeline-trace /dev/null/no: the folder cannot be made",
    ),
    "a training too short to measure costs in": (
        {"pipeline_costs": "profile", "train_iters": 3},
        "--pipeline-costs profile measures the first 4 training iterations, and --train-iters is 3",
    ),
    "costs that cannot be written": (
        {"pipeline_costs": "profile:/dev/null/no/costs.json"},
        "--pipeline-costs profile:/dev/null/no/costs.json: the file's folder cannot be made",
    ),
    "costs written to a folder": (
        {"pipeline_costs": "profile:/tmp"},
        "/tmp is a folder: name a file in it, as profile:/tmp/costs.json",
    ),
    "costs written to nowhere": (
        {"pipeline_costs": "profile:"},
        "--pipeline-costs profile: names no file: write profile:FILE",
    ),
    "messages in a ring": ({"use_ring_exchange_p2p": True}, "does not go with"),
    "a rank alone": ({"fake_process_group": True}, "write megatron-ext rehearse -- before"),
    "offload, no such way": (
        {"pipeline_activation_offload": "some"},
        "--pipeline-activation-offload some: write none, half, full or fit",
    ),
    "offload into no limit": (
        {"pipeline_activation_offload": "fit"},
        "--pipeline-activation-offload fit copies as many activations to the host as a memory",
    ),
    "offload, and no telling how long it takes": (
        {"pipeline_activation_offload": "full", "pipeline_costs": "f=1,i=1,w=1"},
        "add d2h= and h2d= to --pipeline-costs f=1,i=1,w=1",
    ),
    "offload into too low a limit": (
        {"pipeline_activation_offload": "fit", "pipeline_memory_limit": "0.5"},
        "over the memory limit of 0.5 microbatches",
    ),
    "post-validation, batched": (
        {"pipeline_post_validation": True, "pipeline_p2p": "batched"},
        "--pipeline-post-validation does not go with --pipeline-p2p batched",
    ),
    "post-validation, and Megatron compares results": (
        {"pipeline_post_validation": True, "untie_embeddings_and_output_weights": True},
        "--pipeline-post-validation does not go with rerun_mode=validate_results",
    ),
    "post-validation, timers that wait": (
        {
            "pipeline_post_validation": True,
            "untie_embeddings_and_output_weights": True,
            "rerun_mode": "disabled",
            "timing_log_level": 1,
        },
        "with timing_log_level=1: its timers have all ranks wait for one another; write "
        "--no-barrier-with-level-1-timing",
    ),
    "a divided vocabulary, no such way": (
        {"pipeline_vocab_parallel": "3"},
        "--pipeline-vocab-parallel 3: write none, 1 or 2",
    ),
    "a divided vocabulary, batched": (
        {"pipeline_vocab_parallel": 1, "pipeline_p2p": "batched"},
        "--pipeline-p2p batched does not go with --pipeline-vocab-parallel 1",
    ),
    "a divided vocabulary on a loop": (
        {"pipeline_vocab_parallel": 1, "pipeline_schedule": "interleaved", "num_layers": 8},
        "whose stages are on ranks [0, 1, 2, 3, 0, 1, 2, 3]: choose a schedule with one stage",
    ),
    "a divided vocabulary of a hybrid model": (
        {
            "pipeline_vocab_parallel": 1,
            "num_layers": None,
            "hybrid_layer_pattern": "*-|*-|*-|*-",
        },
        "--pipeline-vocab-parallel 1 does not go with hybrid_layer_pattern=*-|*-|*-|*-: it divides "
        "the tables of a GPTModel",
    ),
    "a vocabulary of fewer rows than ranks": (
        {"pipeline_vocab_parallel": 2, "vocab_size": 3},
        "--vocab-size 3 cannot be split over 4 ranks",
    ),
    "a given padding that does not divide": (
        {"pipeline_vocab_parallel": 2, "padded_vocab_size": 66},
        "a vocabulary of 66 cannot be split evenly over 4 ranks (pipeline x tensor parallel): pad "
        "it to 68",
    ),
    "a divided vocabulary, activations that are saved": (
        {"pipeline_vocab_parallel": 1, "save_activations_interval": 2},
        "--pipeline-vocab-parallel 1 does not go with save_activations_interval=2: drop",
    ),
    "a divided vocabulary, gradients that are saved": (
        {"pipeline_vocab_parallel": 2, "save_dgrads_interval": 2},
        "--pipeline-vocab-parallel 2 does not go with save_dgrads_interval=2: drop",
    ),
    "a divided vocabulary, another loss": (
        {"pipeline_vocab_parallel": 2, "fp16": True, "fp16_lm_cross_entropy": True},
        "--pipeline-vocab-parallel 2 does not go with fp16_lm_cross_entropy=True: drop",
    ),
    "multi-token prediction on the first rank of a loop": (
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "interleaved-zb",
            "mtp_num_layers": 1,
            "position_embedding_type": "rope",
            "pipeline_model_parallel_layout": "Ett|tt|m|L",
        },
        "Ett|tt|m|L: multi-token prediction is on the first pipeline rank, where Megatron neither",
    ),
    "multi-token prediction, tied and saved": (
        {
            "mtp_num_layers": 1,
            "position_embedding_type": "rope",
            "save": "/dev/null/no",
            "save_interval": 5,
        },
        "--save: Megatron cannot write a torch_dist checkpoint of multi-token prediction with tied",
    ),
    "multi-token prediction, a divided vocabulary": (
        {"mtp_num_layers": 1, "position_embedding_type": "rope", "pipeline_vocab_parallel": 1},
        "--pipeline-vocab-parallel 1 does not go with mtp_num_layers=1: multi-token prediction",
    ),
    "multi-token prediction, and layers that do not divide": (
        {
            "mtp_num_layers": 2,
            "position_embedding_type": "rope",
            "pipeline_schedule": "zb-v",
            "num_layers": 12,
        },
        "--pipeline-model-parallel-layout 'Ett|tt|tt|tt|t|t|t|tmmL'",
    ),
    "more slices than tokens": (
        {"pipeline_slices": 32},
        "a sequence of 16 tokens cannot be cut into 32 slices",
    ),
    "a divided vocabulary over the memory limit": (
        {"pipeline_vocab_parallel": 1, "pipeline_schedule": "1f1b", "pipeline_memory_limit": "4"},
        "over the memory limit of 4 microbatches",
    ),
}


def first_rank(flags: list[str]) -> None:
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    with pytest.raises(SystemExit) as end:
        main([str(SCRIPT), *flags])
    assert end.value.code == 2


@pytest.mark.parametrize("case", CASES)
def test_refused_before_process_groups(case: str) -> None:
    overrides, text = CASES[case]
    settings = {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-h1", **overrides}
    flags = model_flags(**settings)
    (result,) = run_ranks(1, lambda rank: first_rank(flags), connect=False)
    assert result.exit_code == 0, result.error + result.stderr
    assert "megatron_ext: error: " in result.stderr and text in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"use_distributed_optimizer": True},
            "this schedule puts stages on ranks [0, 2, 1, 3], and optimizer states of its "
            "checkpoints would go to the wrong stages under a schedule that puts stages on other "
            "ranks: add --dist-ckpt-optim-fully-reshardable",
        ),
        (
            {"ckpt_format": "torch"},
            "a rank's stages are others than stock's: to load or save, write --ckpt-format "
            "torch_dist",
        ),
    ],
)
def test_a_table_whose_checkpoints_others_would_misread(
    overrides: dict[str, object], text: str, tmp_path: Path
) -> None:
    """A schedule file with stages in other places than stock's is refused if the checkpoint's
    format does not name stages. If two stages of one size have swapped places, a resume under 1f1b
    gives each the other's optimizer states, or in Megatron's older format its weights. No message
    used to say so, and the loss drifted."""
    rows = [",".join(f"{stage}{kind}{k}" for kind in "FB" for k in range(8)) for stage in range(4)]
    (tmp_path / "swapped.csv").write_text("\n".join(rows[stage] for stage in (0, 2, 1, 3)))
    flags = model_flags(
        pipeline_model_parallel_size=4,
        pipeline_schedule=tmp_path / "swapped.csv",
        save=tmp_path,
        save_interval=2,
        **overrides,
    )
    (result,) = run_ranks(1, lambda rank: first_rank(flags), connect=False)
    assert result.exit_code == 0, result.error + result.stderr
    assert text in result.stderr, result.stderr


def test_a_table_for_another_number_of_microbatches_than_an_evaluation_has(tmp_path: Path) -> None:
    """A schedule file is refused if its number of microbatches differs from that of an evaluation.
    Such a command used to be called right before the launch, and the training failed in its first
    evaluation."""
    rows = [",".join(f"{stage}{kind}{k}" for k in range(8) for kind in "FB") for stage in range(4)]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    flags = model_flags(
        pipeline_model_parallel_size=4,
        pipeline_schedule=tmp_path / "table.csv",
        eval_iters=1,
        eval_global_batch_size=2,
    )
    (result,) = run_ranks(1, lambda rank: first_rank(flags), connect=False)
    assert result.exit_code == 0, result.error + result.stderr
    text = "--eval-global-batch-size 2: the schedule cannot run evaluations of 2 microbatches: "
    assert text in result.stderr, result.stderr


def test_help_shows_our_flags_in_their_own_group() -> None:
    """--help lists our flags in a group of their own. Megatron 0.19.2's own --help ends in a
    ValueError, because one of its help texts has a bare %."""

    def show_help(rank: int) -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
            main([str(SCRIPT), "--help"])
        return text.getvalue()

    (result,) = run_ranks(1, show_help, connect=False)
    assert result.exit_code == 0, result.error
    group = result.value.split("pipeline schedules of megatron_ext")[1]
    assert "--pipeline-schedule SPEC" in group and "--pipeline-costs COSTS" in group
