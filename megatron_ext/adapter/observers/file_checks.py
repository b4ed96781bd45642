"""Checks of the iterations that are observed, and of the files that then are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.config import COSTS_FILE, PROFILE, TRACED_OF_RUN, PipelineConfig
from megatron_ext.runtime.measure import profile


def check_trace(args: Any, config: PipelineConfig) -> None:
    """Refuse a trace of iterations that will not run, or in a folder that cannot be created.

    Raises:
        ValueError: the iterations or the folder are impossible.
    """
    assert config.trace is not None
    traced, last = config.trace_iters, args.train_iters
    if traced is None and last is not None and last < TRACED_OF_RUN[-1]:
        raise ValueError(
            f"--pipeline-trace {config.trace} traces iterations {TRACED_OF_RUN[0]} to "
            f"{TRACED_OF_RUN[-1]} of a run, and the last iteration is {last} (--train-iters): name "
            "earlier iterations with --pipeline-trace-iters A:B, or train longer"
        )
    if traced is not None and last is not None and traced[-1] > last:
        raise ValueError(
            f"--pipeline-trace-iters {traced.start}:{traced.stop} includes iteration {traced[-1]}, "
            f"and the last iteration is {last} (--train-iters): trace earlier iterations, or train "
            "longer"
        )
    _make(config.trace, f"--pipeline-trace {config.trace}: the folder")


def check_profile(args: Any, config: PipelineConfig) -> None:
    """Refuse a measurement of iterations that will not run, or into a file that cannot be written.

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
    if config.costs.text == PROFILE:  # goes into a folder that is checked, or made, anyway
        return
    _make(path.parent, f"--pipeline-costs {config.costs}: the file's folder")
    if path.is_dir():
        raise ValueError(
            f"--pipeline-costs {config.costs}: {path} is a folder: name a file in it, as "
            f"profile:{path / COSTS_FILE}"
        )


def _make(folder: Path, name: str) -> None:
    """Make ``folder`` if it is not there. Raise ValueError, which calls it ``name``, if that
    fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} cannot be made: {error}") from None
