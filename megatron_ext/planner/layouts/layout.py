"""Layouts: the layers of each stage, as data and as Megatron's arguments write them.

A layout is only the number of layers of each stage. Megatron has several texts for it, of which the
shortest is written: the layers of the two ends, or all stages, or the pattern of a hybrid model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice

from megatron_ext.cost_model.model import Model, Stage, stages_of

_SEGMENT_END = "|"
# Character in a hybrid model's pattern between the main layers and those of multi-token prediction.
_BEFORE_DEPTHS = "/"


@dataclass(frozen=True)
class Layout:
    """Number of layers of each stage, in order.

    The embedding is on the first stage, the output layer and the loss on the last one.

    Attributes:
        depths: depths of multi-token prediction on each stage; (): all are on the last one.
    """

    layers: tuple[int, ...]
    depths: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def is_even(self) -> bool:
        return len(set(self.layers)) == 1

    def of(self, model: Model) -> tuple[Stage, ...]:
        """Return the layers of ``model`` that this layout puts on each stage."""
        return stages_of(model, self.layers, self.depths or None)

    def text(self, depths: int = 0) -> str:
        """Return the value of ``--pipeline-model-parallel-layout``, such as ``Et*4|(t*5|)*6t*3mL``.

        There are ``depths`` of multi-token prediction on the last stage if the layout does not say.
        """
        numbers = self.depths or [0] * (self.stages - 1) + [depths]
        segments = [
            _repeated("t", count) + "m" * number
            for count, number in zip(self.layers, numbers, strict=True)
        ]
        segments[0] = "E" + segments[0]
        segments[-1] += "L"
        *before, last = segments
        text = ""
        for segment, alike in groupby(before):
            count = len(list(alike))
            short = f"({segment}{_SEGMENT_END})*{count}"
            plain = f"{segment}{_SEGMENT_END}" * count
            text += short if len(short) < len(plain) else plain
        return text + last

    def cut(self, pattern: str) -> str:
        """Return a hybrid model's layer ``pattern`` with marks at the ends of stages.

        ``M*M-`` becomes ``M*|M-``.
        """
        main, slash, depths = pattern.partition(_BEFORE_DEPTHS)
        left = iter(main.replace(_SEGMENT_END, ""))
        segments = ["".join(islice(left, count)) for count in self.layers]
        return _SEGMENT_END.join(segments) + slash + depths

    @property
    def ends(self) -> tuple[int, int] | None:
        """Layers of the first and of the last stage, if all other stages have equally many; else
        None.

        These two numbers then describe the layout.
        """
        first, *between, last = self.layers
        return (first, last) if len(set(between)) == 1 else None


def _repeated(letter: str, count: int) -> str:
    return letter * count if count < 4 else f"{letter}*{count}"


def evenly(layers: int, stages: int) -> Layout:
    """Return the layout of ``layers`` that is as even as possible: the first stages have one
    more."""
    per_stage, more = divmod(layers, stages)
    return Layout(tuple(per_stage + (stage < more) for stage in range(stages)))


def even_layout(model: Model, stages: int) -> Layout:
    """Return the layout with the same number of the model's layers on each stage.

    Raises:
        ValueError: the number of layers is not divisible by the stages.
    """
    return Layout(tuple(model.evenly(stages)))
