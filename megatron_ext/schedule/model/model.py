"""A model as people describe it, and its stages on a placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields

from megatron_ext.schedule.model.estimate import ModelDimensions


@dataclass(frozen=True)
class Model:
    """A dense GPT.

    Attributes:
        sequence, micro_batch: tokens of a microbatch are their product.
        vocabulary: rows of embedding and output layer, padded as Megatron pads it.
        ffn: width of the MLP; 0: four times ``hidden``.
        kv_heads: query groups; 0: as many as heads.
        head_width: of a query; 0: ``hidden`` over ``heads``.
        gated: whether the MLP has a gate (SwiGLU).
        tied: whether embedding and output layer share a table.
        recompute: whether whole layers are run again in the backward pass.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    micro_batch: int = 1
    ffn: int = 0
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = False
    tied: bool = False
    recompute: bool = False

    def on_stages(self, layers: Sequence[int], tensor_parallel: int) -> ModelDimensions:
        """The dimensions of this model in bf16, with ``layers`` on each stage."""
        width = self.head_width or self.hidden // self.heads
        return ModelDimensions(
            layers=tuple(layers),
            hidden=self.hidden,
            ffn_hidden=self.ffn or 4 * self.hidden,
            query_width=self.heads * width,
            key_value_width=(self.kv_heads or self.heads) * width,
            gated=self.gated,
            heads=self.heads,
            sequence=self.sequence,
            micro_batch=self.micro_batch,
            vocabulary=self.vocabulary,
            tensor_parallel=tensor_parallel,
            recompute=self.recompute,
        )

    def evenly(self, stages: int) -> list[int]:
        """Its layers, as many on each of so many stages.

        Raises:
            ValueError: they do not divide.
        """
        per_stage, remainder = divmod(self.layers, stages)
        if remainder:
            raise ValueError(f"{self.layers} layers do not divide over {stages} stages")
        return [per_stage] * stages


_BOOLEANS = {"true": True, "false": False}
_EXAMPLE = (
    "write layers=64,hidden=6144,heads=48,sequence=4096,vocabulary=128000 and what differs of "
    "micro-batch=1,ffn=24576,kv-heads=48,head-width=128,gated=false,tied=false,recompute=false"
)


def parse_model(text: str) -> Model:
    """``layers=64,hidden=6144,...``: the fields of `Model`, with hyphens.

    Raises:
        ValueError: a field missing, unknown, given twice, or no such number.
    """
    known = {field.name.replace("_", "-"): field for field in fields(Model)}
    given: dict[str, int | bool] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in known or known[key].name in given:
            what = "given twice" if key in known else "unknown"
            raise ValueError(f"model {text!r}: {key!r} is {what}; {_EXAMPLE}")
        read: Callable[[str], int | bool] = int
        if known[key].default is False:
            read = _BOOLEANS.__getitem__
        try:
            given[known[key].name] = read(value)
        except (KeyError, ValueError):
            raise ValueError(f"model {text!r}: {part!r} is not understood; {_EXAMPLE}") from None
    missing = [key for key, f in known.items() if f.default is MISSING and f.name not in given]
    if missing:
        raise ValueError(f"model {text!r}: missing {', '.join(missing)}; {_EXAMPLE}")
    for name, number in given.items():
        if not isinstance(number, bool) and number < 1:
            raise ValueError(f"model {text!r}: {name} is {number}; at least 1 is needed")
    model = Model(**given)  # type: ignore[arg-type]
    if not model.head_width and model.hidden % model.heads:
        raise ValueError(
            f"model {text!r}: hidden {model.hidden} does not divide over {model.heads} heads: "
            f"give head-width"
        )
    return model
