"""Trainings of the tests' small GPT that are compared: Megatron's own, and ours from the same
weights.

    PAIR = Training(2, {"pipeline_model_parallel_size": 2})
    PAIR.start_as_stock(pipeline_schedule="zb-h1")   # both from one initialisation
    PAIR.resume_as_stock(pipeline_schedule="zb-v")   # ours from a checkpoint of Megatron's

Weights are drawn by pipeline rank, so a schedule whose stages are on other ranks resumes from a
checkpoint. A training to compare with is run once for all tests of a process that name the same
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.helpers.megatron_runs import SCRIPT, Run, assert_same, losses, model_flags, train
from tests.helpers.ranks import HANGS, lasting_folder, run_ranks, values

Flags = Mapping[str, object]
Saved = tuple[list[Run], Path]
Pair = tuple[list[Run], list[Run]]


@dataclass(frozen=True)
class Training:
    """A model, how it is parallelised and how long it trains.

    ``flags`` are Megatron's, as for `model_flags`. ``config`` is set on the model's config, for
    settings without a flag. ``build`` builds the model in place of Megatron's own builder.
    Checkpoints to resume from are those of iteration ``saved_at``. If there is a ``world``,
    trainings that are compared run in a process of their own, which calls it first. ``around``
    returns a context that is entered around each training.
    """

    ranks: int
    flags: Flags
    saved_at: int = 1
    config: Flags = field(default_factory=dict)
    build: Callable[..., Any] | None = None
    script: Path = SCRIPT
    world: Callable[[], object] | None = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def but(self, **flags: object) -> Training:
        """Return this training with other ``flags``; None drops one."""
        return replace(self, flags={**self.flags, **flags})

    def words(self, **more: object) -> list[str]:
        """Return the flags of the command line."""
        return model_flags(**{"global_batch_size": self.global_batch_size, **self.flags, **more})

    @property
    def global_batch_size(self) -> int:
        """The batch size in ``flags``; by default, a pipeline has twice as many microbatches as
        ranks."""
        given = self.flags.get("global_batch_size")
        split = ("tensor_model_parallel_size", "context_parallel_size")
        rows = math.prod(int(str(self.flags.get(name, 1))) for name in split)
        samples = int(str(self.flags.get("micro_batch_size", 1)))
        return int(str(given)) if given else samples * (2 * self.ranks // rows)

    def run(self, **more: object) -> list[Run]:
        """Train from initial weights, with the additional flags ``more``."""
        with self.around():
            return train(self.ranks, self.words(**more), self.script, self.config, self.build)

    def known(self, **more: object) -> list[Run]:
        """Train as `run` does, once for equal arguments."""
        key = self._key(more)
        if key not in _RUNS:
            _RUNS[key] = self.run(**more)
        return _RUNS[key]

    def saved(self, **more: object) -> Saved:
        """Train from the initialisation, once for equal arguments, and return the results and the
        folder with the checkpoint."""
        key = self._key(more)
        if key not in _SAVED:
            folder = lasting_folder()
            _SAVED[key] = self.run(save=folder, save_interval=self.saved_at, **more), folder
        return _SAVED[key]

    def resume(self, folder: Path | None = None, /, **more: object) -> list[Run]:
        """Continue from the checkpoint in ``folder`` or, without one, from the checkpoint of
        Megatron's own training. Later checkpoints of that folder are not read."""
        folder = self.saved()[1] if folder is None else folder
        return self.run(load=folder, ckpt_step=self.saved_at, **more)

    def resume_as(self, whole: Saved, /, **more: object) -> list[Run]:
        """Continue from the checkpoint of ``whole``, and fail unless the training ends as ``whole``
        did."""
        return self._alike(self.resume(whole[1], **more), whole[0], self.saved_at, more)

    def resume_as_stock(self, **ours: object) -> list[Run]:
        """Continue from the checkpoint of Megatron's own training under a schedule, and fail unless
        both end alike."""
        whole, runs = self._in_world(lambda: (self.saved()[0], self.resume(**ours)))
        return self._alike(runs, whole, self.saved_at, ours)

    def start_as_stock(self, **ours: object) -> list[Run]:
        """Train from the initialisation under a schedule, and fail unless it ends as Megatron's own
        training does."""
        return self.start_as(self, **ours)

    def start_as(self, other: Training, /, **ours: object) -> list[Run]:
        """Train from the initialisation, and fail unless the training ends as ``other`` does."""
        whole, runs = self.beside(other, **ours)
        return self._alike(runs, whole, 0, ours)

    def beside(self, other: Training, /, **ours: object) -> Pair:
        """Train ``other``, and then this training with the flags ``ours``, both from the
        initialisation."""
        return self._in_world(lambda: (other.known(), self.run(**ours)))

    def _in_world(self, make: Callable[[], Pair]) -> Pair:
        world = self.world
        if world is None:
            return make()

        def made(rank: int) -> Pair:
            world()
            return make()

        (runs,) = values(run_ranks(1, made, timeout=2 * HANGS, connect=False))
        return runs

    def _alike(self, runs: list[Run], whole: list[Run], begin: int, flags: Flags) -> list[Run]:
        """Return ``runs``, which began at iteration ``begin``; fail unless they ended as ``whole``
        did."""
        assert len(losses(runs)) == len(losses(whole)) - begin
        if flags.get("pipeline_schedule") is not None:
            assert {run.schedule for run in runs} == {"PipelineStep"}
        assert_same(runs, whole)
        return runs

    def _key(self, more: Flags) -> Any:
        config = tuple(sorted(self.config.items()))
        words = tuple(self.words(**more))
        return self.ranks, words, self.saved_at, config, self.build, self.script


# Results of this process's trainings, by their arguments.
_RUNS: dict[Any, list[Run]] = {}
_SAVED: dict[Any, Saved] = {}
