"""Tests of trainings with post-validation: the numbers equal those of the same schedule without it,
to the last bit.

Gradients are clipped. A step is rolled back and repeated by Megatron's own optimizer if it is
clipped or skipped, or so near to either that a partial sum cannot tell. Only some iterations are
logged, because steps do not overlap around a logged iteration.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from megatron.training.global_vars import get_args

from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.fetched import megatron_sources
from tests.helpers.megatron_runs import Run, assert_same, evaluations, losses, model_flags, train
from tests.helpers.ranks import Script
from tests.pipeline.failures.test_bad_days import end_of, pipeline_flags

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt_with_bad_gradients.py"
CLIP = 10.0  # above all norms of these small models, except those that are scaled up


@dataclass(frozen=True)
class Setting:
    """Training on ``ranks`` ranks under one schedule, with and without post-validation."""

    ranks: int
    schedule: str
    flags: Mapping[str, object]

    def train(self, bad: Mapping[int, float], *, validates: bool, **more: object) -> list[Run]:
        """Train with the gradients of some iterations multiplied by the factors in ``bad``."""
        monkeypatch = pytest.MonkeyPatch()
        with monkeypatch.context() as context:
            context.setenv("BAD_GRADIENTS", json.dumps({k: repr(v) for k, v in bad.items()}))
            flags = {
                "pipeline_schedule": self.schedule,
                "pipeline_post_validation": validates,
                "rerun_mode": "disabled",
                "clip_grad": CLIP,
                "log_interval": 5,
                "no_check_for_nan_in_loss_and_grad": True,
                **self.flags,
                **more,
            }
            return train(self.ranks, model_flags(**flags), SCRIPT)

    def both(self, bad: Mapping[int, float], **more: object) -> tuple[list[Run], list[Run]]:
        """Return the runs with post-validation, and those without."""
        return (
            self.train(bad, validates=True, **more),
            self.train(bad, validates=False, **more),
        )


PP4: dict[str, object] = {"pipeline_model_parallel_size": 4, "num_layers": 8}
PP2: dict[str, object] = {"pipeline_model_parallel_size": 2}
DP2 = PP2  # two pipeline ranks on four ranks: two replicas
UNTIED: dict[str, object] = {"untie_embeddings_and_output_weights": True}
DROPOUT: dict[str, object] = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
FP16: dict[str, object] = {"fp16": True, "initial_loss_scale": 2.0**10, "loss_scale_window": 5}
# With these costs the steps of four ranks overlap although four stages recompute.
RECOMPUTED: dict[str, object] = {
    "pipeline_recompute": "first:4",
    "pipeline_costs": "f=10,i=12,w=8,comm=1",
}
SHARDED: dict[str, object] = {"use_distributed_optimizer": True}
OVERLAPS = SHARDED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
OVERLAPPED = OVERLAPS | {"bf16": True}
TOKENS: dict[str, object] = {"calculate_per_token_loss": True}
OFFLOADED_AT_ONCE: dict[str, object] = {
    "bf16": True,
    **SHARDED,
    "use_precision_aware_optimizer": True,
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
}
OFFLOADED = OFFLOADED_AT_ONCE | OVERLAPS | {"main_grads_dtype": "bf16"}
GATHERED_EARLY: dict[str, object] = {
    "bf16": True,
    **OVERLAPS,
    "overlap_param_gather_with_optimizer_step": True,
    "ckpt_format": "torch",
}

SETTINGS = {
    "zb-auto, dropout": Setting(2, "zb-auto", PP2 | UNTIED | DROPOUT),
    "zb-v, fp16": Setting(4, "zb-v", PP4 | FP16),
    "zb-2p, fp16, dp 2, sharded": Setting(4, "zb-2p", DP2 | UNTIED | FP16 | SHARDED),
    "zb-v, bf16, dp 2, overlaps, tokens": Setting(4, "zb-v", DP2 | OVERLAPPED | TOKENS),
    **dict(
        at_night(
            ("zb-v, tp 2", Setting(4, "zb-v", DP2 | {"tensor_model_parallel_size": 2})),
            ("zb-v, tokens", Setting(4, "zb-v", DP2 | TOKENS)),
            ("zb-v, bf16, dp 2, overlaps", Setting(4, "zb-v", DP2 | OVERLAPPED)),
            ("zb-2p", Setting(4, "zb-2p", PP4 | UNTIED)),
            ("zb-v, tied", Setting(4, "zb-v", PP4)),
            ("zb-v, recompute, dropout", Setting(4, "zb-v", PP4 | DROPOUT | RECOMPUTED)),
            ("v-auto, bf16", Setting(2, "v-auto", PP2 | {"bf16": True})),
            ("zb-v, bf16, dp 2, overlaps, offloaded", Setting(4, "zb-v", DP2 | OFFLOADED)),
            (
                "zb-2p, bf16, dp 2, sharded, offloaded",
                Setting(4, "zb-2p", DP2 | UNTIED | OFFLOADED_AT_ONCE),
            ),
            ("zb-v, bf16, dp 2, gathered early", Setting(4, "zb-v", DP2 | GATHERED_EARLY)),
        )
    ),
}

EVERY_THIRD = dict.fromkeys(range(3, 51, 3), 100.0)


def times_redone(runs: list[Run]) -> int:
    return max(run.redone for run in runs)


# The cases in fp16 run at night, as another test of this file clips steps in fp16 by day.
@pytest.mark.parametrize("name", [name for name in SETTINGS if IS_NIGHT or "fp16" not in name])
def test_clips_on_every_third_step(name: str) -> None:
    setting = SETTINGS[name]
    runs, expected = setting.both(EVERY_THIRD, train_iters=7)
    assert_same(runs, expected)
    # Iterations 3 and 6 are clipped and repeated. Post-validation begins after the first two steps,
    # and iteration 5 is logged.
    assert times_redone(runs) == 2


def test_many_steps_of_all_kinds() -> None:
    """A training with post-validation equals the one without it over many steps: clipped ones,
    infinite and NaN gradients under a dynamic loss scale, and evaluations in between."""
    setting, steps = Setting(2, "zb-auto", PP2 | UNTIED | FP16), 9
    if IS_NIGHT:
        setting, steps = SETTINGS["zb-v, fp16"], 50
    bad = EVERY_THIRD | {7: float("inf"), 8: float("inf"), 16: float("nan"), 31: float("inf")}
    more: dict[str, object] = {"train_iters": steps, "eval_interval": steps // 3, "eval_iters": 1}
    runs, expected = setting.both(bad, log_interval=10, **more)
    assert_same(runs, expected)
    # Three evaluations run during the training, and two at its end.
    assert len(losses(runs)) == steps and len(evaluations(runs)) == 5
    assert times_redone(runs) > steps // 5


def test_saved_and_resumed(tmp_path: Path) -> None:
    setting = SETTINGS["zb-2p, fp16, dp 2, sharded"]
    bad = {3: 100.0, 4: float("inf"), 7: float("nan")}
    save = {"save": tmp_path, "save_interval": 4, "dist_ckpt_optim_fully_reshardable": True}
    whole = setting.train(bad, validates=False, train_iters=8)
    setting.train(bad, validates=True, train_iters=8, exit_interval=4, **save)
    resumed = setting.train(bad, validates=True, train_iters=8, load=tmp_path)
    assert len(losses(resumed)) == 4
    assert_same(resumed, whole)


@nightly("test_placements.py has the script on a V, and the tests above steps that are clipped")
def test_the_upstream_script() -> None:
    """Megatron's pretrain_gpt.py trains with post-validation as without it, with gradients that are
    clipped in some steps."""
    script = megatron_sources() / "pretrain_gpt.py"
    flags: dict[str, object] = {
        "pipeline_schedule": "zb-v",
        "rerun_mode": "disabled",
        "clip_grad": 1.0,
        "log_interval": 10,
        "train_iters": 14,
    }
    reference = train(4, model_flags(**PP4 | flags), script)
    runs = train(4, model_flags(**PP4 | flags, pipeline_post_validation=True), script)
    assert_same(runs, reference)
    assert times_redone(runs) > 0


# --- a rank that fails between its optimizer step and the verdict


@dataclass(frozen=True)
class Failure:
    """Fault after the optimizer step of ``iteration``: ``rank`` is killed, or raises."""

    rank: int
    iteration: int
    is_killed: bool

    def install(self, rank: int) -> None:
        from megatron_ext.features.post_validation.adapter.pending import PostValidation

        take_step = PostValidation.optimizer_step

        def fail(validation: PostValidation, stock: Any, optimizer: Any) -> Any:
            result = take_step(validation, stock, optimizer)
            if rank == self.rank and get_args().curr_iteration + 1 == self.iteration:
                assert validation.is_pending
                if self.is_killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the rank is broken")
            return result

        PostValidation.optimizer_step = fail  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("rank", "iteration", "is_killed"),
    [
        pytest.param(2, 6, True, id="killed before a checkpoint"),
        *at_night(
            pytest.param(0, 5, True, id="killed before a step"),
            pytest.param(1, 6, False, id="throws before a checkpoint"),
        ),
    ],
)
def test_no_checkpoint_of_a_step_that_is_not_validated(
    script: Script, tmp_path: Path, rank: int, iteration: int, is_killed: bool
) -> None:
    flags = pipeline_flags(
        3,
        6,
        pipeline_schedule="zb-v",
        pipeline_post_validation=True,
        rerun_mode="disabled",
        log_interval=100,
        save=tmp_path,
        save_interval=3,
        distributed_timeout_minutes=10,
    )
    flags[flags.index("--train-iters") + 1] = "9"
    results = end_of(script, 3, flags, Failure(rank, iteration, is_killed))
    assert results[rank].exit_code == (-signal.SIGKILL if is_killed else 1)
    for other, result in enumerate(results):
        if other != rank:
            assert result.exit_code == 1
            # A rank that already has the verdict goes on, and meets the failure at the start of the
            # checkpoint.
            assert "PeerFailure: pipeline rank" in result.stderr or "Connection" in result.stderr
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert not list(tmp_path.glob("iter_0000006/*"))
