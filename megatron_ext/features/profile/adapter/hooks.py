"""Hooks of costs that a training measures (``--pipeline-costs profile``).

Passes are timed one at a time, in the first iterations of the training. A launch in which that is
impossible (passes overlap, the training is too short, the file cannot be written) is refused before
the training begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, override

from megatron_ext.adapter.observers.observer import Step, StepObserver
from megatron_ext.adapter.observers.written_folder import make_folder
from megatron_ext.adapter.pairs.overlap_setting import FLAG, requests_pairs
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.training_hooks import TrainingHooks
from megatron_ext.adapter.training_globals import training_global
from megatron_ext.adapter.transformer_engine.captured import GRAPHS, captures
from megatron_ext.config import COSTS_FILE, PROFILE, PipelineConfig, flag
from megatron_ext.features.profile.adapter.step_profile import StepProfile, costs_path
from megatron_ext.features.profile.refusals import PROFILE_REFUSALS
from megatron_ext.runtime.measure import profile
from megatron_ext.schedule.dealing import MicrobatchOrder


class ProfileHooks(TrainingHooks):
    """Hooks that measure costs in the first steps, and rebuild the program with these costs."""

    @override
    @classmethod
    def is_on(cls, ours: PipelineConfig, settings: Any) -> bool:
        return PROFILE_REFUSALS.may_be_on(ours)

    @override
    @classmethod
    def check_arguments(cls, args: Any, ours: PipelineConfig) -> None:
        _refuse_overlap(args, ours)
        if captures(args):
            raise ValueError(
                f"{flag('costs')} {ours.costs} does not go with {GRAPHS}: measured costs may "
                f"change the order of passes after it was captured; write 'estimate', or a costs "
                f"file"
            )
        _check(args, ours)

    @override
    def check_call(self, call: Call) -> None:
        _refuse_overlap(call.config, self._config)

    @override
    def observers(self) -> Sequence[StepObserver[Step]]:
        path = costs_path(self._config, training_global("_GLOBAL_ARGS"))
        assert path is not None
        by_place = self._config.microbatch_order is not MicrobatchOrder.ARRIVAL
        return [StepProfile(path, self._programs, by_place=by_place)]


def _refuse_overlap(settings: Any, ours: PipelineConfig) -> None:
    """Refuse ``settings`` that request overlapped passes, which cannot be timed one by one.

    ``settings`` are Megatron's arguments or a config.
    """
    if requests_pairs(settings):
        raise ValueError(
            f"{flag('costs')} {ours.costs} measures passes one by one, and with {FLAG} the times "
            f"of two overlapped passes cannot be told apart; write {flag('costs')} estimate or a "
            f"costs file, or drop {FLAG}"
        )


def _check(args: Any, config: PipelineConfig) -> None:
    """Refuse to measure iterations that will not run, or to write a file that cannot be written.

    Raises:
        ValueError: the iterations or the file are impossible.
    """
    path = config.costs.profile
    assert path is not None
    if args.train_iters is not None and args.train_iters < profile.STEPS:
        raise ValueError(
            f"--pipeline-costs {config.costs} measures the first {profile.STEPS} training "
            f"iterations, and --train-iters is {args.train_iters}: train longer, or give a costs "
            f"file or 'estimate'"
        )
    # Without a file name the costs go into the folder of checkpoints, which Megatron checks or
    # makes.
    if config.costs.text == PROFILE:
        return
    make_folder(path.parent, f"--pipeline-costs {config.costs}: the file's folder")
    if path.is_dir():
        raise ValueError(
            f"--pipeline-costs {config.costs}: {path} is a folder: name a file in it, as "
            f"profile:{path / COSTS_FILE}"
        )
