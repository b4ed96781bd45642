"""Hooks by which a feature takes part in one step.

Steps name no feature: they call the hooks of those that are on, in the order of
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
    """Hooks of one feature in one step, which may be an evaluation.

    Attributes:
        ends: tensors that the first and the last stage exchange with the feature.
        context: what the feature does around single passes.
    """

    ends: PipelineEnds | None = None
    context: PassContext | None = None

    def split(self, split: Split) -> Split:
        """Return which weight gradients wait for W, given those of other features."""
        return split

    def iterators(self, iterators: list[Any]) -> list[Any]:
        """Return the data iterators that the step reads from, one per chunk."""
        return iterators

    def boundary(self, boundary: Boundary) -> Boundary:
        """Return shape and type of the tensor that passes between stages."""
        return boundary

    def stage_class(self, number: int) -> StageClass | None:
        """Return the class of stage ``number``; None: as without this feature."""
        return None

    def owners(self, stages: Mapping[int, ModelStage], boundary: Boundary) -> Sequence[Owner]:
        """Return the owners of the feature's kinds of action. `ends` and `context` are read
        afterwards."""
        return ()

    def around(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of all passes, which begins when parameters are being gathered."""
        return contextlib.nullcontext()

    def after_passes(self, tokens: Tensor) -> Tensor | None:
        """Return the ``tokens`` by which to scale gradients; None if they are scaled later."""
        return tokens


def one_of[T](hooks: Iterable[StepHooks], given_by: Callable[[StepHooks], T | None]) -> T | None:
    """Return the one result that is not None: at most one feature may give one."""
    given = {
        type(feature).__name__: value
        for feature in hooks
        if (value := given_by(feature)) is not None
    }
    assert len(given) <= 1, f"{' and '.join(given)} give the same part of a step"
    return next(iter(given.values()), None)
