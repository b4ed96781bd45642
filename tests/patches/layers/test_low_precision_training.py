"""Tests of trainings of a GPT in FP8 and FP4 under our schedules, compared with stock. Their
kernels are stand-ins."""

from __future__ import annotations

import functools
import multiprocessing
from typing import Any

import pytest

from tests.helpers import quantization_on_cpu as quantization
from tests.helpers import transformer_engine_on_cpu as on_cpu
from tests.helpers.combinations import at_night, nightly
from tests.helpers.megatron_runs import losses
from tests.helpers.trainings import Training
from tests.helpers.transformer_engine_gpt import provide, use_transformer_engine

Settings = dict[str, Any]

NEWEST = on_cpu.VERSIONS[-1]
BLACKWELL = (10, 0)  # compute capability of Blackwell, which has all recipes

MXFP8: Settings = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
TENSORWISE: Settings = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
PRECISIONS: dict[str, Settings] = {  # settings of each precision, by its name in public recipes
    "fp8_delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8_cs": TENSORWISE,
    "fp8_sc": {"fp8": "hybrid", "fp8_recipe": "blockwise"},
    "fp8_mx": MXFP8,
    "nvfp4": {"fp4": "e2m1", "fp4_recipe": "nvfp4"},
}
OUTPUT_LAYER: Settings = {"fp8_output_proj": True}
BF16_ENDS: Settings = {"first_last_layers_bf16": True}

MODEL: Settings = {
    "pipeline_model_parallel_size": 2,
    "bf16": True,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 64,
}
LOOP: Settings = {"num_virtual_stages_per_pipeline_rank": 2}


def shown(kind: str, precision: str, settings: Settings) -> Any:
    """Return a test case with a mark of the public recipes that it covers."""
    mark = pytest.mark.covers("B", (kind,), precision=precision, **settings)
    return pytest.param(precision, settings, marks=mark)


def both(
    flags: Settings, schedule: str, settings: Settings, resumes: bool = False, **more: object
) -> None:
    """Train stock and ``schedule`` from the same weights, and assert that they are equal. With
    ``resumes`` ours starts from a checkpoint of stock. ``more`` are flags of ours."""
    on_cpu.fetch(NEWEST)  # fetched here, because only the test itself can be skipped
    quantised = multiprocessing.Value("i")

    def use_low_precision() -> None:
        use_transformer_engine(NEWEST, BLACKWELL)
        quantization.watchers.append(lambda quantizer, tensor: _count(quantised))

    build = functools.partial(provide, True, False, settings)
    training = Training(2, {**flags, "train_iters": 3}, build=build, world=use_low_precision)
    compare = training.resume_as_stock if resumes else training.start_as_stock
    assert len(losses(compare(pipeline_schedule=schedule, **more))) == 3 - resumes
    assert quantised.value, "nothing is tested: no tensor was quantised"


def _count(quantised: Any) -> None:
    with quantised.get_lock():
        quantised.value += 1


@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        shown("line", "fp8_mx", OUTPUT_LAYER),
        *at_night(
            *(shown("line", precision, {}) for precision in PRECISIONS),
            shown("line", "fp8_cs", BF16_ENDS),
        ),
    ],
)
def test_one_stage_a_rank(precision: str, settings: Settings) -> None:
    both(MODEL, "zb-h1", PRECISIONS[precision] | settings)


@nightly("test_low_precision.py has loops pass by pass")
@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        *(shown("loop", precision, {}) for precision in PRECISIONS),
        shown("loop", "fp8_cs", BF16_ENDS),
        shown("loop", "fp8_mx", OUTPUT_LAYER),
    ],
)
def test_a_loop(precision: str, settings: Settings) -> None:
    both(MODEL | LOOP, "interleaved-zb", PRECISIONS[precision] | settings)


@nightly("test_low_precision.py has V's pass by pass")
@pytest.mark.parametrize(
    ("precision", "settings"),
    [
        *(shown("v", precision, {}) for precision in PRECISIONS),
        shown("v", "fp8_cs", BF16_ENDS),
        shown("v", "fp8_mx", OUTPUT_LAYER),
    ],
)
def test_a_v(precision: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings in low precision on a V have stock's losses if rounding is not random. NVFP4's
    stochastic rounding of gradients draws in the order of a rank's backward passes, so it is
    switched off here."""
    # Transformer Engine loads the state of delayed scaling only with this variable.
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")
    both(MODEL, "zb-v", PRECISIONS[precision] | settings, resumes=True)


@nightly("test_recompute.py has them in full precision")
@pytest.mark.parametrize("precision", ["fp8_cs", "fp8_mx", "nvfp4"])
def test_recomputed_passes(precision: str) -> None:
    both(MODEL, "zb-h1", PRECISIONS[precision], pipeline_recompute="first:2")
