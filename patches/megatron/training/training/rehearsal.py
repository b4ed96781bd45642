"""Training loop of one rank without its peers, for rehearsals only.

Megatron trains if global rank 0 has a loader, which other ranks learn by a broadcast. Torch's fake
backend delivers nothing, so a rank without a loader would exit with code 0 before its first step. A
rehearsal always trains, and never evaluates. It times whole steps, and ends after the last step
that it needs.

Not patched: train, evaluate, and all computation.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from megatron.training.global_vars import get_args

from megatron_ext.patches.engine import Patch, wrap

_TRAINING = "megatron.training.training"

# Modules that Megatron imports while it sets up a training. Without their import here, each forked
# rank would spend half of its time on it. Some versions of Megatron lack some of them.
for _name in ("tokenizers.text", "models.mimo", "dist_checkpointing.strategies.torch"):
    with contextlib.suppress(ImportError):
        importlib.import_module(f"megatron.core.{_name}")


class StepWatcher(Protocol):
    """Observer of the training steps of one rank that a rehearsal runs without its peers."""

    def set_up(self, model: Any) -> None:
        """Prepare for the training of ``model``, a list of chunks; called before the first step."""

    def step(self, run: Callable[[], Any], model: Any) -> Any:
        """Run one training step of ``model``, and return its result."""


def patches(watcher: StepWatcher) -> tuple[Patch, ...]:
    """Return the patches by which one rank trains without its peers, observed by ``watcher``."""

    def train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = inspect.signature(original).bind(*args, **kwargs).arguments["model"]
        return watcher.step(lambda: original(*args, **kwargs), model)

    def set_up(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        watcher.set_up(made[0])
        return made

    return (
        wrap(
            f"{_TRAINING}:build_train_valid_test_data_loaders",
            always_train,
            reason="rank 0 decides whether to train, and is absent in a rehearsal",
        ),
        wrap(
            f"{_TRAINING}:setup_model_and_optimizer",
            set_up,
            reason="a training that cannot be rehearsed is refused before its first step",
        ),
        wrap(f"{_TRAINING}:train_step", train, reason="a rehearsal times and counts whole steps"),
    )


def always_train(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build the data loaders; let this rank train even if it has none, and never evaluate."""
    loaders = original(*args, **kwargs)
    megatrons = get_args()
    megatrons.do_train = (megatrons.train_iters or 0) > 0
    megatrons.do_valid = megatrons.do_test = False
    return loaders
