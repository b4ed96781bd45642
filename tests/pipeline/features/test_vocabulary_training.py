"""Tests of trainings with the vocabulary split over all pipeline ranks, compared with stock
Megatron.

Stock saves after each iteration; a schedule with --pipeline-vocab-parallel loads the first
checkpoint and trains on. Sums over a split vocabulary have another order, so numbers are close and
not bitwise equal. Gradients are compared after one step, tensor by tensor: with --adam-beta1 0
Adam's first moment is the gradient. Weights say less, because Adam moves a weight by the sign of
its gradient even if that gradient is mere rounding, such as the one of the bias of the keys.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from scripts.pretrain_gpt import model_provider
from tests.helpers import context_parallel
from tests.helpers.combinations import at_night, nightly
from tests.helpers.fetched import megatron_sources
from tests.helpers.megatron_runs import Run, evaluations, losses, train_or_fail
from tests.helpers.trainings import Saved, Training

SAVED_AT = 1
ULP = 2.0**-23  # unit in the last place of fp32, relative
# Bounds relative to the largest gradient of a tensor. The largest difference seen in fp32 is 4
# ulps. In bf16, whose numbers are 2**-8 apart, it is 2**-6, in the bias of a norm: a sum over
# tokens that cancel.
GRADIENTS = {"fp32": 8 * ULP, "bf16": 2.0**-5}
Flags = dict[str, object]

UNTIED: Flags = {"untie_embeddings_and_output_weights": True}
# Models with tensor parallelism have few layers, because gloo's sums are slow.
TENSOR: Flags = {"tensor_model_parallel_size": 2, "num_layers": 4}
SEQUENCE: Flags = TENSOR | {"sequence_parallel": True}
ROPE: Flags = {"position_embedding_type": "rope"}
SMALLER: Flags = {"num_layers": 4}
OPTIMIZER: Flags = SMALLER | {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "dist_ckpt_optim_fully_reshardable": True,
}


@contextlib.contextmanager
def dividing_sequences() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        context_parallel.install(patch)
        yield


def training(ranks: int, pipeline: int, flags: Flags | None = None) -> Training:
    """Return a training that saves a checkpoint after each iteration."""
    given: Flags = {
        "pipeline_model_parallel_size": pipeline,
        "num_layers": 8,
        "micro_batch_size": 2,
        "train_iters": SAVED_AT + 2,
        "eval_interval": SAVED_AT + 1,
        "eval_iters": 1,
        "adam_beta1": 0,  # Adam's first moment is the gradient
        "make_vocab_size_divisible_by": 8,
        **(flags or {}),
    }
    divides = "context_parallel_size" in given
    return Training(ranks, given, SAVED_AT, around=dividing_sequences if divides else nullcontext)


SETTINGS = {
    "pp2": training(2, 2),
    "pp2 untied": training(2, 2, UNTIED),
    "pp4": training(4, 4),
    "pp4 untied": training(4, 4, UNTIED),
    "tp2": training(4, 2, TENSOR),
    "sp untied": training(4, 2, SEQUENCE | UNTIED),
    "sp rope": training(4, 2, SEQUENCE | ROPE),
    "distributed optimizer": training(4, 2, OPTIMIZER),
    "distributed optimizer untied": training(4, 2, OPTIMIZER | UNTIED),
    "loss per token": training(2, 2, SMALLER | {"calculate_per_token_loss": True}),
    "clipped": training(2, 2, SMALLER | {"clip_grad": 0.5}),
    "bf16": training(2, 2, SMALLER | {"bf16": True}),
    "divided sequences": training(4, 2, SMALLER | ROPE | {"context_parallel_size": 2}),
    "divided sequences, loss per token": training(
        4, 2, SMALLER | UNTIED | {"context_parallel_size": 2, "calculate_per_token_loss": True}
    ),
    "divided sequences, SP": training(8, 2, SEQUENCE | {"context_parallel_size": 2}),
}


def tensors(folder: Path, iteration: int) -> dict[str, Tensor]:
    """Return the model and the optimizer states of a checkpoint, by Megatron's keys."""
    reader = FileSystemReader(folder / f"iter_{iteration:07}")
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype.is_floating_point
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


def furthest(ours: Tensor, stocks: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest element of
    ``stocks``."""
    return float((ours - stocks).abs().max() / stocks.abs().max())


CASES = [
    ("pp2 untied", "zb-v", 2),
    ("distributed optimizer", "zb-v", 1),
    *at_night(
        ("sp rope", "zb-v", 1),  # by day test_vocabulary.py has tensor-parallel ranks
        ("bf16", "zb-auto", 2),
        ("pp2", "1f1b", 1),
        ("pp4", "v-half", 2),
        ("pp4", "zb-v", 1),
        ("tp2", "v-half", 1),
        ("loss per token", "v-half", 2),
        ("clipped", "1f1b", 2),
        ("pp4 untied", "1f1b", 2),
        ("pp4 untied", "zb-auto", 1),
        ("sp untied", "1f1b", 2),
        ("distributed optimizer untied", "zb-auto", 2),
        ("bf16", "zb-v", 1),
        ("divided sequences", "1f1b", 1),
        ("divided sequences", "zb-v", 2),
        ("divided sequences, loss per token", "zb-v", 1),
        ("divided sequences, loss per token", "zb-auto", 2),
        ("divided sequences, SP", "zb-v", 2),
    ),
]


def divided(setting: str, schedule: str | None, variant: int | None, **more: object) -> Saved:
    """Return a run that continues from stock's checkpoint, and the folder of its own
    checkpoints."""
    ours = {"pipeline_schedule": schedule, "pipeline_vocab_parallel": variant, **more}
    stock = SETTINGS[setting].saved()[1]
    return SETTINGS[setting].saved(load=stock, ckpt_step=SAVED_AT, **ours)


def assert_close(runs: list[Run], reference: list[Run], precision: str = "fp32") -> None:
    """Assert that losses of training and evaluation, and gradient norms, are close to those of
    ``reference``.

    A loss is a sum over one sample after another. Its difference grows from step to step, as that
    of the weights does; up to four ulps were seen. In bf16 the difference of norms grows as well:
    1.5 % after one step where the CPU multiplies bf16 itself (AMX), a fifth of that where it does
    not.
    """
    share = 16 * ULP if precision == "fp32" else 2.0**-10
    ours = losses(runs)
    assert ours == pytest.approx(losses(reference)[-len(ours) :], rel=share)
    ours = evaluations(runs)
    assert ours and ours == pytest.approx(evaluations(reference)[-len(ours) :], rel=share)
    norms = runs[0].norms
    stocks = reference[0].norms[-len(norms) :]
    # Accepted differences of the gradient norm, for the first step and for later ones.
    shares = [16 * ULP] * 2 if precision == "fp32" else [2.0**-8, 2.0**-5]
    assert norms[0] and norms[0] == pytest.approx(stocks[0], rel=shares[0])
    assert norms == pytest.approx(stocks, rel=shares[1])


@pytest.mark.parametrize(("setting", "schedule", "variant"), CASES)
def test_it_trains_as_stock_does(setting: str, schedule: str, variant: int) -> None:
    precision = "bf16" if setting == "bf16" else "fp32"
    reference, stocks_folder = SETTINGS[setting].saved()
    runs, folder = divided(setting, schedule, variant)
    assert len(losses(runs)) == len(losses(reference)) - SAVED_AT
    assert_close(runs, reference, precision)
    if setting == "clipped":
        assert min(reference[0].norms) > 0.5, "nothing was clipped"

    ours, stocks = (tensors(path, SAVED_AT + 1) for path in (folder, stocks_folder))
    assert {key: tensor.shape for key, tensor in ours.items()} == {
        key: tensor.shape for key, tensor in stocks.items()
    }, "keys and shapes of a checkpoint"
    gradients = [key for key in stocks if ".exp_avg." in key]
    assert len(gradients) == len([key for key in stocks if "optimizer" not in key])
    for key in gradients:
        assert furthest(ours[key], stocks[key]) < GRADIENTS[precision], key


@pytest.mark.parametrize("schedule", ["zb-v", *at_night("1f1b")])
def test_weights_are_gathered_before_they_are_read(schedule: str) -> None:
    """Weights of a split table are gathered before our passes read them, although no module's call
    waits for the gather. There is no checkpoint or evaluation in between, which would gather the
    table too."""
    setting = SETTINGS["distributed optimizer"].but(eval_interval=1000, eval_iters=0)
    reference, folder = SETTINGS["distributed optimizer"].saved()
    ours = losses(setting.resume(folder, pipeline_schedule=schedule, pipeline_vocab_parallel=2))
    assert ours == pytest.approx(losses(reference)[SAVED_AT:], rel=16 * ULP)


# ---- checkpoints; other tests show that keys and shapes are stock's


@pytest.mark.parametrize(
    ("case", "setting", "schedule", "variant"),
    [
        *at_night(
            (("pp2 untied", "zb-v", 2), "pp2 untied", None, None),
            (("pp4", "v-half", 2), "pp4", None, None),
        ),
        (("distributed optimizer", "zb-v", 1), "distributed optimizer", None, None),
        (("pp2 untied", "zb-v", 2), "pp4 untied", "1f1b", 2),
        *at_night(
            (("sp untied", "1f1b", 2), "sp untied", "zb-v", None),
            (("pp4 untied", "1f1b", 2), "pp2 untied", "zb-v", 1),
        ),
    ],
)
def test_saved_with_it_and_resumed(
    case: tuple[str, str, int],
    setting: str,
    schedule: str | None,
    variant: int | None,
) -> None:
    """A checkpoint of a training with a split vocabulary is resumed by stock, by a schedule with a
    whole vocabulary, and by a split one on another number of ranks."""
    reference, folder = divided(*case)
    ours = {"pipeline_schedule": schedule, "pipeline_vocab_parallel": variant}
    ours["global_batch_size"] = SETTINGS[case[0]].global_batch_size
    runs, _ = SETTINGS[setting].saved(load=folder, ckpt_step=SAVED_AT + 1, **ours)
    assert len(losses(runs)) == 1
    assert_close(runs, reference)


def test_states_saved_rank_by_rank_fit_a_divided_vocabulary_only() -> None:
    """Optimizer states that were saved rank by rank are refused if the vocabulary is split in
    another way. Only Megatron's fully reshardable format fits any split. Megatron itself compares
    only the number of ranks."""
    flags: Flags = {"dist_ckpt_optim_fully_reshardable": None, "pipeline_schedule": "1f1b"}
    setting = SETTINGS["distributed optimizer"].but(**flags)
    _, folder = setting.saved(train_iters=SAVED_AT, pipeline_vocab_parallel=1)
    words = setting.words(load=folder, ckpt_step=SAVED_AT)
    results = train_or_fail(setting.ranks, words)
    for result in results:
        assert result.exit_code == 1 and result.error.endswith("SystemExit: 2\n"), result.error
    text = "stages were on Megatron's own ranks with the vocabulary split over all, and are on"
    assert text in results[0].stderr


def test_another_padding(capfd: pytest.CaptureFixture[str]) -> None:
    """A checkpoint loads into a vocabulary with another padding. The checkpoint has 64 rows. The
    number of rows must be a multiple of 6 here, so stock pads to 66 rows. Split over 2 ranks it
    must also be a multiple of 4, so our schedules pad to 72 rows."""
    reference, _ = divided("pp2", None, None, make_vocab_size_divisible_by=72)
    capfd.readouterr()
    runs, folder = divided("pp2", "1f1b", 2, make_vocab_size_divisible_by=6)
    lines = [line for line in capfd.readouterr().out.splitlines() if "padded to" in line]
    assert lines == [
        "megatron_ext: the vocabulary is padded to 72, not 66, so that it divides over 2 pipeline "
        "x 1 tensor parallel ranks"
    ]
    assert_close(runs, reference)
    weight = tensors(folder, SAVED_AT + 2)["embedding.word_embeddings.weight"]
    assert weight.shape == (72, 32)


# ---- memory


def noting(folder: Path) -> Any:
    """Return a model provider that writes the shapes of the tables in each chunk to ``folder``."""

    def provide(*args: Any, **kwargs: Any) -> Any:
        model = model_provider(*args, **kwargs)
        shapes = {
            name: list(parameter.shape)
            for name, parameter in model.named_parameters()
            if "word_embeddings" in name or "output_layer" in name
        }
        note = folder / f"{dist.get_rank()} {kwargs.get('vp_stage')}"
        note.write_text(json.dumps(shapes))
        return model

    return provide


@pytest.mark.parametrize(
    ("setting", "schedule", "tables", "vocabulary"),
    [
        ("pp4", "1f1b", ["embedding.word_embeddings.weight"], 256_000),
        ("sp untied", "zb-v", ["embedding.word_embeddings.weight", "output_layer.weight"], 32_000),
    ],
)
def test_a_rank_holds_its_part_of_the_tables(
    setting: str, schedule: str, tables: list[str], vocabulary: int, tmp_path: Path
) -> None:
    noted = replace(SETTINGS[setting], build=noting(tmp_path))
    noted.run(
        vocab_size=vocabulary - 1,
        hidden_size=4,
        train_iters=1,
        eval_interval=1000,
        eval_iters=0,
        pipeline_schedule=schedule,
        pipeline_vocab_parallel=1,
    )
    first_chunks = [note for note in tmp_path.iterdir() if note.name[-2:] in ("ne", " 0")]
    assert len(first_chunks) == 4
    for note in tmp_path.iterdir():
        expected = {table: [vocabulary // 4, 4] for table in tables} if note in first_chunks else {}
        assert json.loads(note.read_text()) == expected, note.name


# ---- scripts and flags outside the settings above


@nightly("test_placements.py has the script on a V, and the tests above this vocabulary")
def test_megatrons_own_script() -> None:
    script = megatron_sources() / "pretrain_gpt.py"
    setting = replace(SETTINGS["pp2"], script=script)
    runs = setting.resume(pipeline_schedule="zb-v", pipeline_vocab_parallel=2)
    assert_close(runs, setting.saved()[0])


@pytest.mark.parametrize(
    "more",
    [
        {"eod_mask_loss": True, "pipeline_model_parallel_layout": "E|tttt|tttt|L"},
        *at_night(
            {"num_experts": 4, "moe_aux_loss_coeff": 1e-2, "disable_bias_linear": True},
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            {"fp16": True, "initial_loss_scale": 2**12},
        ),
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_split_vocabulary_goes_with_recompute_scaling_experts_and_bare_ends(more: Flags) -> None:
    """A split vocabulary trains as stock together with full recompute, loss scaling, experts, and
    stages that have only the embedding or only the output layer."""
    layout = more.pop("pipeline_model_parallel_layout", None)
    setting = SETTINGS["pp2 untied"].but(**more)
    reference, folder = setting.saved()
    ours: Flags = {"pipeline_schedule": "zb-v", "pipeline_model_parallel_layout": layout}
    resumed: Flags = {"load": folder, "ckpt_step": SAVED_AT, "pipeline_vocab_parallel": 1}
    runs, _ = setting.saved(**resumed, **ours)
    assert_close(runs, reference, "bf16" if "fp16" in more else "fp32")
