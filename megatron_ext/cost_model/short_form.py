"""A dense GPT described in one word: ``layers=64,hidden=6144,...``.

Somebody who only wonders about a model has no configuration file. The word has the few sizes that
decide its costs; everything else has the defaults of a dense GPT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields

from megatron_ext.base.words import shown
from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.model import Model


@dataclass(frozen=True)
class Described:
    """Dimensions of a dense GPT and of its microbatches, as a user writes them.

    Attributes:
        sequence, micro_batch: tokens of a microbatch are their product.
        vocabulary: rows of embedding and output layer, padded as Megatron pads it.
        ffn: width of the MLP; 0: four times ``hidden``.
        kv_heads: query groups; 0: as many as heads.
        head_width: width of a query; 0: ``hidden`` over ``heads``.
        gated: whether the MLP has a gate (SwiGLU).
        tied: whether embedding and output layer share a table.
        recompute: whether whole layers are recomputed in the backward pass.
        precision: number format of layers' matrices.
    """

    layers: int
    hidden: int  # plain words: a key of the text that describes a model
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
    precision: Precision = Precision.BF16

    @property
    def model(self) -> Model:
        return Model(
            layers=("*-",) * self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.kv_heads or self.heads,
            kv_channels=self.head_width or self.hidden // self.heads,
            ffn_hidden_size=self.ffn or 4 * self.hidden,
            vocabulary=self.vocabulary,
            gated_linear_unit=self.gated,
            normalization="RMSNorm",
            untie_embeddings_and_output_weights=not self.tied,
        )

    def execution(self, tensor_parallel: int = 1) -> Execution:
        """Return how a rank runs a microbatch of this model.

        Raises:
            ValueError: tensor parallelism does not divide the sizes, as Megatron requires.
        """
        divided = {
            "heads": self.heads,
            "ffn": self.model.ffn_hidden_size,
            "sequence": self.sequence,
            "vocabulary": self.vocabulary,
        }
        # If the query groups divide the tensor-parallel ranks, several ranks share a group;
        # otherwise the ranks have to divide the groups.
        if self.kv_heads and tensor_parallel % self.kv_heads:
            divided["kv-heads"] = self.kv_heads
        for name, size in divided.items():
            if size % tensor_parallel:
                raise ValueError(
                    f"tp={tensor_parallel}: {name} {size} cannot be split evenly over "
                    f"{tensor_parallel} tensor-parallel ranks; write a tp that divides it, or "
                    f"another {name}"
                )
        return Execution(
            sequence=self.sequence,
            micro_batch=self.micro_batch,
            tensor_parallel=tensor_parallel,
            recompute=self.recompute,
            precision=self.precision,
        )


# The limit of layers is lower than other limits, as each layer takes memory in the description.
_MOST_LAYERS, _MOST = 100_000, 10**12

_BOOLEANS = {"true": True, "false": False}
_EXAMPLE = (
    "write layers=64,hidden=6144,heads=48,sequence=4096,vocabulary=128000, and those of the "
    "following that differ: micro-batch=1,ffn=24576,kv-heads=48,head-width=128,gated=false,"
    "tied=false,recompute=false,precision=bf16"
)


def parse_model(text: str) -> Described:
    """Return the dense GPT that a text such as ``layers=64,hidden=6144,...`` describes.

    Its keys are the fields of `Described` with hyphens.

    Raises:
        ValueError: a field is missing, unknown, given twice, or not such a number.
    """
    known = {field.name.replace("_", "-"): field for field in fields(Described)}
    what = shown(text)
    given: dict[str, int | bool | Precision] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in known or known[key].name in given:
            wrong = "given twice" if key in known else "unknown"
            raise ValueError(f"model {what!r}: {shown(key)!r} is {wrong}; {_EXAMPLE}")
        read: Callable[[str], int | bool | Precision] = int
        if known[key].default is False:
            read = _BOOLEANS.__getitem__
        elif key == "precision":
            read = Precision
        try:
            given[known[key].name] = read(value)
        except (KeyError, ValueError):
            raise ValueError(
                f"model {what!r}: {shown(part)!r} is not understood; {_EXAMPLE}"
            ) from None
    missing = [key for key, f in known.items() if f.default is MISSING and f.name not in given]
    if missing:
        raise ValueError(f"model {what!r}: missing {', '.join(missing)}; {_EXAMPLE}")
    for name, number in given.items():
        most = _MOST_LAYERS if name == "layers" else _MOST
        if type(number) is int and not 1 <= number <= most:
            needed = "at least 1 is needed" if number < 1 else f"no model has more than {most:,}"
            raise ValueError(f"model {what!r}: {name} is {shown(number)}; {needed}")
    described = Described(**given)  # type: ignore[arg-type]
    if not described.head_width and described.hidden % described.heads:
        raise ValueError(
            f"model {what!r}: hidden {described.hidden} cannot be split evenly over "
            f"{described.heads} heads: give head-width"
        )
    if described.kv_heads and described.heads % described.kv_heads:
        raise ValueError(
            f"model {what!r}: heads {described.heads} are no multiple of kv-heads "
            f"{described.kv_heads}, and every query group has the same number of heads; write a "
            "kv-heads that divides heads"
        )
    return described
