"""Hooks by which a feature takes part in one step.

Steps name no feature: they call the hooks of the features that are on, in the order of
`adapter.features`. Methods do nothing unless a feature overrides them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_ext.adapter.splitting import Split
from megatron_ext.adapter.step.model_stage import ModelStage
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.owner import Owner
from megatron_ext.runtime.stage_io import PipelineEnds
from megatron_ext.runtime.stage_passes import PassContext

StageClass = Callable[..., ModelStage]  # a class or function with the arguments of ModelStage


class StepHooks:
    """Hooks by which one feature takes part in one step, which may be an evaluation.

    Attributes:
        ends: tensors that the first and the last stage exchange with the feature.
        context: work of the feature before and after single passes.
    """

    ends: PipelineEnds | None = None
    context: PassContext | None = None

    def split(self, split: Split) -> Split:
        """Return ``split``, changed if other weight gradients have to wait for W passes."""
        return split

    def iterators(self, iterators: list[Any]) -> list[Any]:
        """Return the data iterators that the step reads from, one per chunk.

        By default they are unchanged.
        """
        return iterators

    def boundary(self, boundary: Boundary) -> Boundary:
        """Return shape and type of the tensor that passes between stages; by default unchanged."""
        return boundary

    def stage_class(self, number: int) -> StageClass | None:
        """Return the class of stage ``number``; None if the feature needs no class of its own."""
        return None

    def owners(self, stages: Mapping[int, ModelStage], boundary: Boundary) -> Sequence[Owner]:
        """Return the owners, which run the feature's kinds of action.

        `ends` and `context` are read after this call.
        """
        return ()

    def around(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which all passes run.

        It is entered after parameter gathers have started.
        """
        return contextlib.nullcontext()

    def after_passes(self, tokens: Tensor) -> Tensor | None:
        """Return the ``tokens`` by which gradients are scaled.

        Return None if the feature scales them later.
        """
        return tokens


def one_of[T](hooks: Iterable[StepHooks], given_by: Callable[[StepHooks], T | None]) -> T | None:
    """Return the only result of ``given_by`` for ``hooks`` that is not None, else None.

    At most one feature may have such a result.
    """
    given = {
        type(feature).__name__: value
        for feature in hooks
        if (value := given_by(feature)) is not None
    }
    assert len(given) <= 1, f"{' and '.join(given)} give the same part of a step"
    return next(iter(given.values()), None)
