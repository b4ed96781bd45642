"""Tests of small inputs that failed, taken from public reports and scripts, each in its shortest
form."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from typer.testing import CliRunner, Result

from megatron_ext.cli import app
from megatron_ext.compile.output_layer import output_layer_waits
from megatron_ext.cost_model.gpus import parse_gpu
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.planner.command_line import arguments_with
from megatron_ext.launch.planner.launch_job import launch_job_of
from megatron_ext.launch.planner.parsed_launch import LaunchRequest, ParsedLaunch, with_launch
from megatron_ext.planner.candidate import Plan
from megatron_ext.planner.verdict import Written
from tests.helpers.combinations import at_night
from tests.helpers.drawn_models import drawn_by_name
from tests.helpers.megatron_runs import (
    EXPERTS,
    SCRIPT,
    assert_same,
    losses,
    model_flags,
    train,
    train_or_fail,
)
from tests.helpers.trainings import Training
from tests.patches.launch.test_one_judgement import by_doctor, launch_of_words, plan_of

Flags = dict[str, object]

SMALL = shlex.split(
    "--hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --train-iters 100 --lr 1e-4 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 32000 --eval-iters 0 --eval-interval 1000"
)


def doctor(ranks: int, flags: str) -> Result:
    """Run `megatron-ext doctor` on a launch of a small model on ``ranks`` ranks."""
    launch = ["torchrun", "--nproc-per-node", str(ranks), str(SCRIPT), *SMALL, *shlex.split(flags)]
    return CliRunner().invoke(app, ["doctor", "--", *launch], terminal_width=10_000)


def test_case_1_a_layout_of_six_layers_for_eight() -> None:
    """Case 1: `doctor`, `plan` and each rank report a layout with too few layers in Megatron's own
    sentence. They used to end with ``AssertionError: ([3, 3], 8)`` and a traceback."""
    result = doctor(
        8,
        "--global-batch-size 64 --num-layers 8 --pipeline-model-parallel-size 2 "
        "--pipeline-model-parallel-layout Ettt|tttL",
    )
    assert result.exit_code == 1, result.output
    assert "Number of decoder layers 6must match num_layers 8" in " ".join(result.output.split())


EXPERTS_LATER: Flags = {
    **EXPERTS,
    "num_layers": 4,
    "moe_layer_freq": "([0]*2+[1]*2)",
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "use_distributed_optimizer": True,
    "untie_embeddings_and_output_weights": True,
    "dist_ckpt_optim_fully_reshardable": True,
    "train_iters": 3,
}
OFFLOADED: Flags = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
}


@pytest.mark.parametrize("more", [{}, *at_night(OFFLOADED)], ids=lambda more: "-".join(more))
def test_case_12_experts_in_later_layers_are_saved(more: Flags) -> None:
    """Case 12: a distributed optimizer on the CPU is saved if the first stage has no experts. The
    first save used to end in an AssertionError of Megatron's: torch's AdamW counts steps in the
    states of parameters, and the expert optimizer of that stage has none. Under a V another rank
    has these experts, and must load the step count of the other ranks."""
    Training(4, EXPERTS_LATER | more, saved_at=2).resume_as_stock(pipeline_schedule="zb-v")


def first_stage_frozen(*args: Any, **kwargs: Any) -> Any:
    model = drawn_by_name(*args, **kwargs)
    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        model.requires_grad_(requires_grad=False)
    return model


def test_case_12_a_frozen_stage_is_saved(tmp_path: Path) -> None:
    """Case 12: a training with a frozen first stage is saved. As in a stage without experts, the
    stage's optimizer has no parameters whose states count the steps."""
    flags: Flags = {
        "pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": True,
        "train_iters": 1,
        "save": tmp_path,
        "save_interval": 1,
    }
    Training(2, flags, build=first_stage_frozen).run()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"


DOCUMENTS: Flags = {
    "pipeline_model_parallel_size": 2,
    "untie_embeddings_and_output_weights": True,
    "reset_position_ids": True,
    "eod_mask_loss": True,
}
MASKED = DOCUMENTS | {"reset_attention_mask": True, "position_embedding_type": "rope"}


@pytest.fixture
def short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit mock documents to 24 tokens, so that most samples contain the end of a document."""
    monkeypatch.setattr(MockGPTLowLevelDataset, "max_sequence_length", 24)


def first_loss(**flags: object) -> float:
    """Return the loss of the first iteration under stock."""
    (loss,) = losses(train(2, model_flags(**flags, train_iters=1)))
    return loss


@pytest.mark.usefixtures("short_documents")
def test_case_5_documents_stay_apart_or_the_schedule_is_refused() -> None:
    """Case 5: the schedule zb-v is refused with --reset-attention-mask, and the schedule zb-h1 has
    stock's losses with this flag. zb-v on two ranks used to have other losses than stock, without a
    message: its inner stages got no mask of documents. Both stages of a linear placement on two
    ranks get the mask."""
    stock = train(2, model_flags(**MASKED))
    assert first_loss(**MASKED | {"reset_attention_mask": None}) != losses(stock)[0]
    assert_same(train(2, model_flags(**MASKED, pipeline_schedule="zb-h1")), stock)
    for rank in train_or_fail(2, model_flags(**MASKED, pipeline_schedule="zb-v")):
        assert "SystemExit: 2" in rank.error
        assert "reset_attention_mask=True: layers apply the mask" in rank.error
        assert "--dataloader-inter-document-masking" in rank.error


@pytest.mark.usefixtures("short_documents")
def test_case_5_positions_and_masked_losses_of_documents_stay_allowed(tmp_path: Path) -> None:
    """Case 5: the schedule zb-v still accepts --reset-position-ids and --eod-mask-loss, with
    stock's losses, because only the first and the last stage read these tensors."""
    saves = {"save": tmp_path, "save_interval": 3}
    stock = train(2, model_flags(**DOCUMENTS, **saves))
    for name in ("reset_position_ids", "eod_mask_loss"):
        assert first_loss(**DOCUMENTS | {name: None}) != losses(stock)[0]
    loads = {"load": tmp_path, "ckpt_step": 3}
    assert_same(train(2, model_flags(**DOCUMENTS, **loads, pipeline_schedule="zb-v")), stock)


def test_case_13_a_divided_vocabulary_with_a_micro_batch_of_two() -> None:
    """Case 13: a vocabulary split over the ranks trains with a micro batch of two. The loss
    function used to get a transposed tensor, of which Megatron's script takes a view, so the first
    step ended in "view size is not compatible"."""
    trained = train(
        2,
        model_flags(
            pipeline_model_parallel_size=2,
            pipeline_schedule="1f1b",
            pipeline_vocab_parallel=1,
            micro_batch_size=2,
            train_iters=1,
        ),
    )
    assert len(losses(trained)) == 1


def test_case_14_multi_token_prediction_before_the_loss() -> None:
    """Case 14: `doctor` counts the bytes of multi-token prediction, its layer and its embedding, on
    the rank that has them. They used to be counted on the loss's rank. `test_model_bytes` compares
    such counts with the parameters of Megatron's models."""
    flags = "--position-embedding-type rope --num-layers 8 --mtp-num-layers 1"
    words = shlex.split(
        f"{flags} --global-batch-size 16 --pipeline-model-parallel-size 4 "
        f"--pipeline-model-parallel-layout 'Ett|t*3|t*3m|L'"
    )
    launch = Launch(str(SCRIPT), False, (*SMALL, *words), world_size=4)
    made = check_launch(launch, None, None).prediction
    assert made is not None
    _, layers, with_mtp, loss = (rank.model_bytes for rank in made.ranks)
    assert with_mtp > 2 * layers and loss < 1.1 * layers
    assert plan_of(launch) == by_doctor(launch)


def test_case_15_a_layout_that_megatron_refuses() -> None:
    """Case 15: `plan` refuses a layout that Megatron refuses, with doctor's reason. It used to give
    a time and a verdict for it."""
    words = shlex.split(
        "--position-embedding-type rope --num-layers 10 --mtp-num-layers 2 --global-batch-size 16 "
        "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout 'E|(t|)*10m|m|m|LL|LL'"
    )
    launch = ["torchrun", "--nproc-per-node", "8", str(SCRIPT), *SMALL, *words]
    result = CliRunner().invoke(app, ["plan", "--gpu", "h100", "--", *launch])
    assert result.exit_code == 2 and "a step" not in result.output
    (why,) = by_doctor(Launch(str(SCRIPT), False, (*SMALL, *words), world_size=8)).whys
    assert why in " ".join(result.output.split())


@pytest.mark.parametrize("more", ["", "--pipeline-schedule zb-h1", "--pipeline-schedule zb-v"])
def test_case_18_layers_that_the_ranks_do_not_divide(more: str) -> None:
    """Case 18: `doctor` and `plan` name a layout that works if layers cannot be split evenly over
    the ranks. Megatron only says that they "should be divisible". The layout used to be named for
    the schedule zb-v only."""
    words = f"--num-layers 30 --global-batch-size 16 --pipeline-model-parallel-size 4 {more}"
    launch = Launch(str(SCRIPT), False, (*SMALL, *shlex.split(words)), 4, installs=True)
    (why,) = by_doctor(launch).whys
    assert why.startswith("30 layers cannot be split evenly over ") and plan_of(launch).whys == (
        why,
    )
    layout = why.partition("--pipeline-model-parallel-layout ")[2].strip("'")
    added = (*launch.arguments, "--pipeline-model-parallel-layout", layout)
    assert not by_doctor(replace(launch, arguments=added)).whys


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--global-batch-size 3", "a step of 3 microbatches"),
        ("--global-batch-size 5", "the last group has 1, which is less than 4 ranks"),
        (
            "--global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 9",
            "groups of 9 must have from 4 (pipeline ranks) to 8",
        ),
        (
            "--global-batch-size 8 --eval-global-batch-size 2 --eval-iters 1",
            "makes an evaluation of 2 microbatches",
        ),
    ],
)
def test_case_2_microbatches_that_stocks_interleaved_schedule_refuses(flags: str, why: str) -> None:
    """Case 2: `doctor` and `plan` refuse numbers of microbatches that stock's interleaved schedule
    refuses, and name a schedule of ours that accepts them. doctor used to call such commands right,
    plan gave them a time, and the first step died (schedules.py 1133 and 1145)."""
    words = (
        "--num-layers 24 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank"
    )
    command = (*SMALL, *shlex.split(f"{words} 2 {flags}"))
    launch = Launch(str(SCRIPT), False, command, world_size=4, installs=True)
    (said,) = by_doctor(launch).whys
    assert why in said and plan_of(launch).whys == (said,)
    ours = said.partition("or --pipeline-schedule ")[2].partition(",")[0]
    added = (*command, "--pipeline-schedule", ours)
    # no schedule accepts a group of microbatches that is larger than a step
    if "stage 9" not in flags:
        assert not by_doctor(replace(launch, arguments=added)).whys


BIG = shlex.split(
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --lr 1e-4 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --eval-interval 1000 --eval-iters 0 "
    "--untie-embeddings-and-output-weights --swiglu --use-distributed-optimizer "
    "--sequence-parallel --train-iters 10 --tensor-model-parallel-size 4 "
    "--pipeline-model-parallel-size 4"
)


@pytest.mark.parametrize(
    ("flags", "microbatches", "fullest"),
    [
        pytest.param(
            "--vocab-size 128000 --global-batch-size 32 --pipeline-schedule 1f1b "
            "--pipeline-vocab-parallel 1",
            *(32, 16.1),
            id="19: a vocabulary that is divided already",
        ),
        pytest.param(
            "--vocab-size 32000 --step-batch-size-schedule '0:16 100M:64' --train-iters 100000",
            *(64, 13.2),
            id="20: a batch in steps",
        ),
        pytest.param(
            "--vocab-size 32000 --global-batch-size 64 --num-virtual-stages-per-pipeline-rank 2 "
            "--microbatch-group-size-per-virtual-pipeline-stage 8",
            *(64, 17.0),
            id="21: a group of microbatches",
        ),
        pytest.param(
            "--vocab-size 128000 --global-batch-size 32 --pipeline-schedule zb-h1",
            *(32, 15.0),
            id="22: zb-h1 without a limit",
        ),
    ],
)
def test_cases_19_to_22_a_command_as_it_stands(
    flags: str, microbatches: int, fullest: float
) -> None:
    """Cases 19 to 22: in its line ``now:``, `plan` describes the given command as `doctor` does.
    The line used to ignore a split vocabulary, a group of microbatches and a batch that grows. It
    also used to describe zb-h1 with the GPU's memory as its limit, although the command has no
    limit: with a limit the weight gradient of the output layer is computed in W, without one in
    I."""
    launch = Launch(str(SCRIPT), False, (*BIG, *shlex.split(flags)), world_size=16, installs=True)
    now = plan_of(launch)
    assert now == by_doctor(launch)
    assert now.microbatches == microbatches
    assert max(now.ranks) / 2**30 == pytest.approx(fullest, abs=0.1)


@pytest.mark.parametrize("limit", [None, "1GiB"])
def test_case_22_the_output_layer_waits_for_w_within_a_limit_alone(
    limit: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Case 22: under the schedule zb-h1 the output layer has a W only under a memory limit, and
    `plan` counts its memory accordingly. plan used to give the last rank 1.5 GiB more than doctor
    did; the training shows that without a limit the output layer has no W."""
    flags: Flags = {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-h1",
        "pipeline_report_split": True,
        "pipeline_memory_limit": limit,
        "vocab_size": 4095,
        "untie_embeddings_and_output_weights": True,
        "train_iters": 2,
        "transformer_impl": "local",
    }
    words = model_flags(**flags)
    with monkeypatch.context() as without_gpus:
        without_gpus.setattr(torch.cuda, "is_available", lambda: False)
        request = LaunchRequest(launch_of_words(2, words))
        waits = with_launch(
            request, lambda parsed: output_layer_waits(parsed.variants.judgement().program)
        )
    train(2, words)
    has_no_w = "1 output layer (its logits' gradient has no room" in capfd.readouterr().out
    assert waits == (not has_no_w) == (limit is not None)


def test_case_20_the_steps_that_hold_most_samples_stand_for_all() -> None:
    """Case 20: `plan` compares schedules at the batch size at which the training reads most of its
    samples, and also prints the times of other sizes. plan used to compare a step of one microbatch
    with a step of 64, and promised a gain of 94.7 %."""
    batches = "--vocab-size 32000 --step-batch-size-schedule '0:16 1M:64 2M:32' --train-iters"
    for iterations, expected in ((10, [16, 32, 64]), (21, [64, 16, 32]), (100, [32, 64, 16])):
        words = (*BIG, *shlex.split(f"{batches} {iterations}"))
        launch = Launch(str(SCRIPT), False, words, world_size=16)
        request = LaunchRequest(launch, gpu=parse_gpu("h100"))

        def sizes(parsed: ParsedLaunch, request: LaunchRequest = request) -> list[int]:
            own = launch_job_of(request, parsed).baseline(Plan((), {}))
            assert own is not None
            main = own.candidate.report.microbatches
            assert f"{main} microbatches" in parsed.facts
            others = own.other_steps
            assert all((others[m] > own.seconds) == (m > main) for m in others)
            return [main, *others]

        made = with_launch(request, sizes)
        assert made[0] == expected[0] and sorted(made) == sorted(expected)


def test_case_23_settings_of_a_schedule_go_with_it() -> None:
    """Case 23: `plan` drops --pipeline-p2p and other settings of our schedules from the command
    with which Megatron's own schedule is compared. plan used to keep these flags in that command,
    and ended with the error that --pipeline-p2p batched is "given without --pipeline-schedule"."""
    ours = ("--pipeline-schedule", "zb-v", "--pipeline-p2p=batched", "--pipeline-metrics")
    launch = Launch(str(SCRIPT), False, (*BIG, *ours), world_size=16, installs=True)
    stock = arguments_with(launch, Written(("--num-layers", "16")))
    assert stock == (*BIG[2:], "--pipeline-metrics", "--num-layers", "16")
    other = arguments_with(launch, Written(("--pipeline-schedule", "zb-h1")))
    assert "--pipeline-p2p=batched" in other


def test_case_16_a_checkpoint_of_another_layout(tmp_path: Path) -> None:
    """Case 16: `doctor` names what is wrong with loading a checkpoint of another layout, and which
    step helps. Stock saved it with two virtual stages a rank and the distributed optimizer. doctor
    used to say "right checkpoints" of each of these launches, and they died. The step that doctor
    now names makes a checkpoint that loads."""
    virtual: dict[str, object] = {"num_virtual_stages_per_pipeline_rank": 2}
    stock = Training(
        2,
        {
            "pipeline_model_parallel_size": 2,
            "train_iters": 3,
            "use_distributed_optimizer": True,
            "untie_embeddings_and_output_weights": True,
        },
    )
    whole, folder = stock.saved(**virtual)
    load: dict[str, object] = {"load": folder, "ckpt_step": 1}

    def says(ranks: Any = 2, **flags: object) -> str:
        ours = ["-m", "megatron_ext"] if "pipeline_schedule" in flags else []
        words = stock.words(**load, **flags)
        launch = ["torchrun", "--nproc-per-node", str(ranks), *ours, str(SCRIPT), *words]
        result = CliRunner().invoke(app, ["doctor", "--json", "--", *launch])
        findings = json.loads(result.stdout)["findings"]
        (found,) = [each for each in findings if each["subject"] == "checkpoints"]
        assert result.exit_code == (0 if "loads whole" in found["text"] else 1), findings
        return f"{found['text']}; {found['fix']}"

    assert "loads whole" in says(**virtual)
    others: list[tuple[int, dict[str, object]]] = [
        (4, {"pipeline_model_parallel_size": 4}),
        (2, {}),
        (2, {"pipeline_schedule": "zb-v"}),
        (2, {"pipeline_model_parallel_layout": "Ettt|tL"}),
    ]
    for ranks, flags in others:
        said = says(ranks, **flags)
        assert "does not load" in said and "--dist-ckpt-optim-fully-reshardable and --save" in said
    assert "does not load: --hidden-size: 32 in the checkpoint, 64 in" in says(
        **virtual, hidden_size=64
    )
    assert "--override-opt-param-scheduler" in says(**virtual, train_iters=4)
    # The run follows doctor's advice: one step under the old command.
    stock.run(
        **load | virtual,
        exit_interval=2,
        save=tmp_path,
        save_interval=1,
        dist_ckpt_optim_fully_reshardable=True,
    )
    load = {"load": tmp_path, "ckpt_step": 2}
    assert "loads whole" in says(pipeline_schedule="zb-v")
    runs = stock.run(**load, pipeline_schedule="zb-v")
    assert losses(runs) == losses(whole)[2:]


def test_case_3_a_ramp_that_megatron_ignores() -> None:
    """Case 3: `doctor` says that Megatron ignores --rampup-batch-size. Megatron 0.19 accepts the
    flag and does not ramp up."""
    sizes = "--num-layers 24 --pipeline-model-parallel-size 4 --global-batch-size 64"
    said = " ".join(doctor(4, f"{sizes} --rampup-batch-size 2 2 200").output.split())
    assert "--rampup-batch-size: Megatron ignores it" in said
    assert "--step-batch-size-schedule" in said


def test_case_4_arguments_from_a_checkpoint() -> None:
    """Case 4: `doctor` checks the batch, tokenizer, data and folder of a command with
    --use-checkpoint-args, because these do not depend on the checkpoint. doctor used to give one
    remark, then "nothing is wrong", although all four were wrong."""
    words = shlex.split(
        "--num-layers 80 --hidden-size 9192 --num-attention-heads 64 --seq-length 4096 "
        "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 1024 "
        "--train-iters 25000 --lr 3e-5 --bf16 --tokenizer-type Llama2Tokenizer "
        "--tokenizer-model missing.model --data-path missing_text_document --split 949,50,1 "
        "--eval-iters 10 --eval-interval 100 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 10 --load missing --use-checkpoint-args"
    )
    command = ["doctor", "--world-size", "400", "--", "python", str(SCRIPT), *words]
    result = CliRunner().invoke(app, command, terminal_width=10_000)
    assert result.exit_code == 2, result.output
    said = " ".join(result.output.split())
    for wrong in ("--global-batch-size 1024 cannot be", "missing.model", "missing_text_document"):
        assert wrong in said, said
    assert "the check stopped: --use-checkpoint-args" in said.split("to correct before")[-1]
