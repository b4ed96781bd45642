"""Tests of optimizer steps that are taken before their post-validation, through the functions of
Megatron's loop.

No process group exists here, so any wait for other ranks would fail.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import async_utils, global_vars, training
from megatron.training.checkpointing import save_checkpoint
from megatron.training.dist_signal_handler import DistributedSignalHandler

from megatron_ext.config import PipelineConfig
from megatron_ext.features.post_validation.adapter import commit_points
from megatron_ext.features.post_validation.adapter import pending as module
from megatron_ext.features.post_validation.adapter.pending import (
    Result,
    StepResult,
    post_validation,
)
from megatron_ext.features.post_validation.runtime.partial_state import PartialState
from megatron_ext.patches.engine import apply
from megatron_ext.patches.features import FEATURES

QUIET = PartialState(squared_norm=0.25, found_inf=False)
CLIPPED = PartialState(squared_norm=9.0, found_inf=False)
INF = PartialState(squared_norm=0.0, found_inf=True)


class Optimizer:
    """Stand-in for Megatron's optimizer, with the attributes that its loop reads."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(clip_grad=1.0)
        self.param_groups: list[dict[str, Any]] = [
            {"default_config": True, "max_lr": 1.0, "lr": 0.0, "weight_decay": 0.0},
            {"lr": torch.tensor(0.0), "weight_decay": 0.0, "wd_mult": 0.5},
        ]
        self.scale = 8.0

    def get_loss_scale(self) -> torch.Tensor:
        return torch.tensor([self.scale])


class Speculative:
    """Stand-in for the optimizer of speculative steps that records its calls. It runs on the first
    of two ranks."""

    snapshot = "nothing"

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.own = QUIET
        self.done: list[str] = []
        self.redone: StepResult | Exception = (True, 3.0, None)
        self.rate_of_redo: float | None = None

    def prepare(self) -> PartialState:
        self.done.append("prepare")
        return self.own

    def is_quiet(self, state: PartialState) -> bool:
        return not state.found_inf and state.squared_norm < 1.0

    def step(self, keep: bool) -> None:
        self.done.append(f"step, keep={keep}")

    def redo(self, found_inf: bool) -> StepResult:
        self.done.append(f"redo, {found_inf=}")
        self.rate_of_redo = self.optimizer.param_groups[0]["lr"]
        if isinstance(self.redone, Exception):
            raise self.redone
        if not self.redone[0]:
            self.optimizer.scale /= 2
        return self.redone


class Messages:
    """Stand-in for the messages of a rank that has a neighbour on both sides."""

    is_first = False
    is_last = False

    def __init__(self) -> None:
        self.passed_on: list[PartialState] = []
        self.verdicts: list[PartialState] = []

    def partial(self) -> PartialState:
        return PartialState(0.0, False)

    def pass_on(self, state: PartialState) -> None:
        self.passed_on.append(state)

    def verdict(self) -> PartialState:
        return self.verdicts.pop(0)


class Loop:
    """Calls of Megatron's function `train`, in its order and with its arguments."""

    def __init__(self) -> None:
        self.optimizer = Optimizer()
        self.speculative = Speculative(self.optimizer)
        self.messages = Messages()
        self.iteration = 0
        self.logged: list[dict[str, Any]] = []
        self.stock: StepResult = (True, 0.5, None)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, 1.0, 0.0, 0, 100, "cosine", 0.1, 0.2, 100, "linear"
        )
        post_validation.connect(self.messages, lambda optimizer: self.speculative)  # type: ignore[arg-type, return-value]

    def step(self) -> tuple[bool, float | None]:
        """Run an iteration, and return the success and the norm that the loop gets for its step."""
        global_vars._GLOBAL_ARGS.curr_iteration = self.iteration
        success, norm, _ = post_validation.optimizer_step(lambda _: self.stock, self.optimizer)
        if post_validation.is_pending:
            success = training.logical_and_across_model_parallel_group(success, group=None)
            norm = training.reduce_max_stat_across_model_parallel_group(norm, group=None)
        if success:
            self.scheduler.step(increment=5)
        self.iteration += 1
        flag = training.training_log(
            {"lm loss": self.iteration},
            {},
            self.optimizer.param_groups[0]["lr"],
            self.iteration,
            self.optimizer.get_loss_scale().item(),
            "as it was",
            0 if success else 1,
            norm,
            None,
            None,
            0,
        )
        assert flag == ("as it was" if post_validation.is_pending else "logged")
        return success, norm

    def verdict(self, whole: PartialState) -> bool:
        return post_validation.verdict(whole)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    """Yield a loop with the patches applied, in which every tenth iteration commits before it ends.
    Two good steps have already switched post-validation on."""
    args = SimpleNamespace(async_save=True, log_interval=10, train_iters=1000)
    for name in commit_points.INTERVALS[1:]:
        setattr(args, name, None)
    args.adlr_autoresume = args.phase_transition_iterations = args.iterations_to_skip = None
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        "megatron_ext.patches.megatron.training.training.training_log.microbatches_will_change",
        lambda args: False,
    )
    made: list[Loop] = []

    def training_log(
        loss_dict: Any,
        total_loss_dict: Any,
        learning_rate: Any,
        iteration: Any,
        loss_scale: Any,
        report_memory_flag: Any,
        skipped_iter: Any,
        grad_norm: Any,
        params_norm: Any,
        num_zeros_in_grad: Any,
        max_attention_logit: Any,
    ) -> str:
        """Log as stock's function does, without Megatron's arguments."""
        if post_validation.answers_at_once:
            training.reduce_max_stat_across_model_parallel_group(learning_rate, group=None)
        made[0].logged.append(
            {
                "iteration": iteration,
                "loss": loss_dict["lm loss"],
                "rate": learning_rate,
                "scale": loss_scale,
                "skipped": skipped_iter,
                "norm": grad_norm,
            }
        )
        return "logged"

    config = PipelineConfig(schedule="zb-v", post_validation=True)
    feature = next(feature for feature in FEATURES if feature.name == "post-validation")
    patches = feature.patches(config)
    stock_log = training.training_log
    log = next(patch for patch in patches if patch.target.endswith(":training_log"))
    with apply([patch for patch in patches if patch is not log]):
        monkeypatch.setattr(training, "training_log", dataclasses.replace(log).build(training_log))
        made.append(Loop())
        yield made[0]
        monkeypatch.setattr(training, "training_log", stock_log)
    post_validation._connection = None
    post_validation._start()


def armed(loop: Loop) -> Loop:
    loop.step()
    loop.step()
    assert not loop.speculative.done
    return loop


def test_the_first_steps_are_stocks_and_arm(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    armed(loop)
    assert "from iteration 3 on: 0 of the last 2 steps were clipped" in capsys.readouterr().out
    loop.step()
    assert loop.speculative.done == ["prepare", "step, keep=True"]
    assert loop.messages.passed_on == [QUIET]
    assert [line["iteration"] for line in loop.logged] == [1, 2]
    assert not capsys.readouterr().out


def test_a_quiet_verdict_keeps_the_step(loop: Loop) -> None:
    armed(loop).step()
    zeroed: list[int] = []
    post_validation.defer(lambda: zeroed.append(len(loop.logged)))
    assert loop.verdict(QUIET)
    assert not post_validation.is_pending
    assert zeroed == [3], "what was put off after the log is done after it"
    rate = loop.optimizer.param_groups[0]["lr"]
    assert loop.logged[-1] == {
        "iteration": 3, "loss": 3, "rate": rate, "scale": 8.0, "skipped": 0, "norm": 0.5,
    }  # fmt: skip
    assert loop.scheduler.num_steps == 15
    assert loop.speculative.done == ["prepare", "step, keep=True"]


def test_until_the_verdict_the_loop_has_the_latest_norm(loop: Loop) -> None:
    loop.stock = (True, 0.7, None)
    armed(loop)
    assert loop.step() == (True, torch.tensor(0.7).item())


def groups(loop: Loop) -> list[tuple[float, float]]:
    return [(float(g["lr"]), float(g["weight_decay"])) for g in loop.optimizer.param_groups]


def test_a_clip_is_redone_under_its_own_learning_rate(loop: Loop) -> None:
    armed(loop)
    before = groups(loop)
    loop.step()
    after = groups(loop)
    assert before != after
    assert not loop.verdict(CLIPPED)
    assert loop.speculative.done[-1] == "redo, found_inf=False"
    assert loop.speculative.rate_of_redo == before[0][0]
    assert (groups(loop), loop.scheduler.num_steps) == (after, 15)
    assert loop.logged[-1]["rate"] == after[0][0]
    assert loop.logged[-1]["norm"] == 3.0 and not loop.logged[-1]["skipped"]


def test_a_skip_takes_the_scheduler_back(loop: Loop) -> None:
    armed(loop)
    before = groups(loop)
    tensor = loop.optimizer.param_groups[1]["lr"]
    loop.speculative.redone = (False, None, None)
    loop.step()
    assert not loop.verdict(INF)
    assert (groups(loop), loop.scheduler.num_steps) == (before, 10)
    assert loop.optimizer.param_groups[1]["lr"] is tensor, "the optimizer holds it"
    assert loop.logged[-1] == {
        "iteration": 3, "loss": 3, "rate": before[0][0], "scale": 4.0, "skipped": 1, "norm": None,
    }  # fmt: skip


def test_what_is_not_quiet_so_far_is_not_stepped(loop: Loop) -> None:
    armed(loop)
    loop.speculative.own = CLIPPED
    assert loop.step()[0], "all ranks go on as after success"
    assert loop.speculative.done == ["prepare"] and loop.messages.passed_on == [CLIPPED]
    assert not loop.verdict(CLIPPED)


def test_the_last_of_the_chain_keeps_nothing(loop: Loop) -> None:
    loop.messages.is_last = True
    armed(loop).step()
    assert loop.speculative.done == ["prepare", "step, keep=False"]


def test_frequent_clips_disarm(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    armed(loop)
    capsys.readouterr()
    loop.step()
    loop.verdict(CLIPPED)
    loop.step()
    loop.verdict(CLIPPED)
    assert "from iteration 5 on: 2 of the last 4 steps" in capsys.readouterr().out
    loop.speculative.done.clear()
    loop.stock = (True, 2.0, None)
    assert loop.step() == (True, 2.0)
    assert not loop.speculative.done and not post_validation.is_pending
    loop.stock = (True, 0.5, None)
    for _ in range(2):
        loop.step()
    assert not post_validation.is_pending
    assert "from iteration 8 on: 3 of the last 7 steps" in capsys.readouterr().out
    loop.step()
    assert post_validation.is_pending


def test_an_iteration_that_logs_settles_first(loop: Loop) -> None:
    armed(loop)
    for _ in range(7):
        loop.step()
        loop.verdict(QUIET)
    loop.messages.verdicts = [INF]
    loop.speculative.redone = (False, None, None)
    loop.step()
    assert not post_validation.is_pending
    assert loop.logged[-1]["iteration"] == 10 and loop.logged[-1]["skipped"] == 1
    assert loop.logged[-1]["rate"] == loop.logged[-2]["rate"]
    assert [line["iteration"] for line in loop.logged] == list(range(1, 11))


def test_a_save_settles_and_fails_before_it_writes(loop: Loop) -> None:
    armed(loop).step()
    loop.messages.verdicts = [CLIPPED]
    loop.speculative.redone = RuntimeError("a link is down")
    for save in (save_checkpoint, training.save_checkpoint_and_time):
        with pytest.raises(RuntimeError, match=r"a link is down|iteration 3 has failed halfway"):
            save()  # none of the arguments is read
    with pytest.raises(RuntimeError, match="iteration 3 has failed halfway"):
        training.save_checkpoint()
    assert len(loop.logged) == 2


def test_a_step_that_fails_halfway_is_not_saved(loop: Loop) -> None:
    armed(loop)

    def fail(state: PartialState) -> None:
        raise ConnectionError("gone")

    loop.messages.pass_on = fail  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        loop.step()
    with pytest.raises(RuntimeError, match="failed halfway"):
        training.save_checkpoint()


def test_neither_signals_nor_saves_are_handled_while_a_verdict_is_pending(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    queue = SimpleNamespace(maybe_finalize_async_calls=lambda *a, **k: asked.append(a))
    monkeypatch.setattr(async_utils, "_async_calls_queue", queue)
    handler = DistributedSignalHandler()
    handler._signal_received = True
    armed(loop).step()
    assert not any(handler.signals_received())
    training.maybe_finalize_async_save(blocking=False)
    assert not asked
    loop.verdict(QUIET)
    assert any(handler.signals_received())
    training.maybe_finalize_async_save(blocking=False)
    assert len(asked) == 1


def test_without_megatrons_loop_every_step_is_stocks(loop: Loop) -> None:
    """Without Megatron's loop every optimizer step is stock's, because no code would commit or roll
    back a step before weights are read."""
    step: Callable[[Any], StepResult] = lambda optimizer: loop.stock  # noqa: E731
    for _ in range(4):
        assert post_validation.optimizer_step(step, loop.optimizer) == loop.stock
    assert not loop.speculative.done


@pytest.mark.parametrize(
    "result", [Result(False, None), Result(False, 0.5), Result(True, 1.5), Result(True, math.nan)]
)
def test_what_is_bad(result: Result) -> None:
    assert not result.is_quiet(clip_grad=1.0)
    assert Result(True, 1.0).is_quiet(clip_grad=1.0)
    assert Result(True, 100.0).is_quiet(clip_grad=0.0)
