"""The order in which the estimate puts measured configurations."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.cost_model.gpus import GPUS, RESERVED_SHARE, USABLE
from megatron_ext.cost_model.messages import collectives
from scripts.layout_order import (
    MEASURED,
    Bars,
    Configuration,
    Prediction,
    bars,
    model_of,
    perturbed,
    predict,
    read,
)

GPU = GPUS["a100"]
ROWS = read(MEASURED)


@pytest.fixture(scope="module")
def predicted() -> dict[Configuration, Prediction]:
    return {row: predict(row, GPU, GPU.rates()) for row in ROWS}


@pytest.fixture(scope="module")
def found(predicted: dict[Configuration, Prediction]) -> Bars:
    return bars(ROWS, predicted)


def test_pairs_are_in_the_right_order(found: Bars) -> None:
    """It was 71 % and 78 % with rates that knew no shapes."""
    assert len(ROWS) == 137 and found.over_2.all == 243 and found.over_10.all == 147
    assert found.over_2.share >= 0.85 and found.over_10.share >= 0.93


def test_pairs_that_differ_in_the_microbatch_alone(found: Bars) -> None:
    """6 of 16 were in the right order."""
    assert found.micro_batch.all == 16 and found.micro_batch.share >= 0.75


def test_regret(found: Bars) -> None:
    assert sum(share <= 0.05 for share in found.regret.values()) >= 4


def test_what_ran_fits(found: Bars) -> None:
    """`plan` said of four of the 49 that they do not fit, by a share of its own."""
    assert found.fits.all == 49 and found.fits.share >= 0.95
    assert sum(found.best_ran.values()) >= 4
    assert found.failed_fit.all == 88 and found.failed_fit.right <= 4


def test_bytes_of_a_configuration(predicted: dict[Configuration, Prediction]) -> None:
    """13B on one rank: all of its parts, each once. Without the loss it would be said to fit."""
    (row, _) = (
        row
        for row in ROWS
        if row.model == "13B" and row.sequence == 2048
        if (row.tensor_parallel, row.pipeline_parallel, row.micro_batch) == (1, 1, 1)
    )
    made = predicted[row]
    parameters = 40 * (4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120) + 2 * 128_000 * 5120
    model = parameters * (2 + 2 + 12 / 32)
    layer = 2 * (4 + 3 + 2 + 1) * 5120 + 2 * 4 * 13824  # bytes of a token
    elements = 2048 * 128_000  # of logits: softmax in fp32, and two gradients
    activations, loss = 40 * 2048 * layer + 4 * elements, 8 * elements
    context = 0.66e9 + 64 * 2**20 + 24 * 12 * 2**20  # one communicator
    assert made.fullest == pytest.approx(model + activations + loss + context, rel=2e-3)
    reserved = RESERVED_SHARE * (activations + loss)
    usable = USABLE * 79 * 2**30
    assert made.fullest + reserved > usable > made.fullest + reserved - loss
    assert made.allowed == pytest.approx(
        model + context + (usable - model - context) / (1 + RESERVED_SHARE), rel=1e-3
    )


def test_a_constant_of_messages_reaches_the_layers() -> None:
    """Seconds of a stage's layers were cached twice and cleared once: another constant of messages
    changed the output layer alone, so that its perturbed figures were those of no constant."""
    row, rates = next(row for row in ROWS if row.tensor_parallel > 1), GPU.rates()
    before = predict(row, GPU, rates).seconds
    with perturbed({"BEGIN": 2.0}, rates) as changed:
        longer = predict(row, GPU, changed).seconds - before
    layers = len(model_of(row).layers) // row.pipeline_parallel
    assert longer > 4 * collectives.BEGIN * layers * row.microbatches


def test_constants_are_perturbed_and_come_back() -> None:
    row, rates = next(row for row in ROWS if row.tensor_parallel > 1), GPU.rates()
    before, begin = predict(row, GPU, rates), collectives.BEGIN
    for factors in ({"linear": 0.8}, {"BEGIN": 1.2}):
        with perturbed(factors, rates) as changed:
            assert predict(row, GPU, changed).seconds > before.seconds
    assert begin == collectives.BEGIN and predict(row, GPU, rates) == before


ROW = Configuration("set", "13B", 2048, 64, 8, 1, 1, 1, False, 10.0)


def test_figures_of_two_configurations() -> None:
    """A prediction in the wrong order, whose choice takes 50 % longer, and does not fit."""
    slow = replace(ROW, micro_batch=2, seconds=15.0)
    failed = replace(ROW, micro_batch=4, seconds=None)
    alone = replace(failed, group="nothing ran")
    made = bars(
        [ROW, slow, failed, alone],
        {
            ROW: Prediction(12.0, 100.0, 80.0),
            slow: Prediction(9.0, 50.0, 80.0),
            failed: Prediction(8.0, 60.0, 80.0),
            alone: Prediction(8.0, 90.0, 80.0),
        },
    )
    assert (made.over_2.right, made.over_2.all) == (made.micro_batch.right, 1) == (0, 1)
    assert made.regret == {"set": 0.5} and (made.fits.right, made.fits.all) == (1, 2)
    assert made.best_ran == {"set": False}
    assert (made.failed_fit.right, made.failed_fit.all) == (1, 2)
    assert made.ratios[1] == pytest.approx(statistics.fmean([1.2, 0.6]))


NAMES = (
    "set,model,sequence,global_batch,gpus,micro_batch,tp,pp,full_recompute,sequence_parallel,"
    "seconds_per_step"
)
LINE = "65B-2048-64,65B,2048,2048,64,1,2,8,0,1,150.5"


def test_another_file_is_read(tmp_path: Path) -> None:
    """Columns in any order, others besides, and the best of repeated runs."""
    path = tmp_path / "others.csv"
    names = ["note", *reversed(NAMES.split(","))]
    lines = [LINE, LINE.replace("150.5", "149"), LINE.replace("150.5", "OOM")]
    lines += [LINE.replace("8,0,1,150.5", "8,1,1,OOM")]
    rows = [",".join(["x", *reversed(line.split(","))]) for line in lines]
    path.write_text("\n".join([",".join(names), *rows, ""]))
    first, again = read(path)
    assert first == Configuration("65B-2048-64", "65B", 2048, 2048, 64, 1, 2, 8, True, 149.0)
    assert again.full_recompute and again.seconds is None
    whole, recomputed = (predict(row, GPU, GPU.rates()) for row in (first, again))
    assert recomputed.fullest < whole.fullest and recomputed.seconds > whole.seconds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no column set, model"),
        (f"{NAMES.replace(',tp', '')}\n", "has no column tp: write set,"),
        (f"{NAMES}\n", "has no row below its first line"),
        (f"{NAMES}\n{LINE.replace('65B,', '70B,')}\n", "line 2: model is '70B': write one of 13B"),
        (f"{NAMES}\n{LINE.replace('150.5', 'failed')}\n", "seconds_per_step is 'failed': write se"),
        (f"{NAMES}\n{LINE.replace('150.5', 'nan')}\n", "seconds_per_step is 'nan'"),
        (f"{NAMES}\n{LINE.replace('65B,2048', '65B,2k')}\n", "line 2: sequence is '2k': write a"),
        (f"{NAMES}\n{LINE.replace(',64,1,2', ',64,1,0')}\n", "tp is '0': write a whole number"),
        (f"{NAMES}\n{LINE.replace(',64,1,2', ',66,1,4')}\n", "66 GPUs do not divide into tp 4"),
        (f"{NAMES}\n{LINE.replace(',64,1,2,8', ',192,1,2,96')}\n", "pp is 96, and 65B has 80"),
    ],
)
def test_a_file_that_is_not_understood(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "others.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(why)):
        read(path)
