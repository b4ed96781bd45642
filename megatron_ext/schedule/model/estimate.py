"""Costs estimated from a model's dimensions, for want of measured ones.

Operations are counted as in Megatron's own papers (Narayanan et al. 2021, appendix; Korthikanti et
al. 2022, section 4 for bytes): a matrix product costs the same forward, for its input gradient and
for its weight gradient; the attention core has no weights, so its backward is all input gradient.
Only ratios matter to a schedule; `Rates` turn operations and bytes into seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, VocabularyCosts
from megatron_ext.schedule.kinds import Held


@dataclass(frozen=True)
class Rates:
    """What a rank reaches: floating-point operations, message bytes, and bytes to the host or back
    (each way at once) per second."""

    operations: float
    bytes: float
    host: float


# bf16 on one H100, one InfiniBand NDR port. PCIe 5 x16 carries some 50e9 bytes one way; two GPUs
# often share a switch, and both directions the host's memory: half of it.
GPU = Rates(operations=400e12, bytes=40e9, host=25e9)
CPU = Rates(operations=20e9, bytes=1e9, host=5e9)  # one core, gloo over loopback, its memory


@dataclass(frozen=True)
class LayerWork:
    """What layers do with a token, and keep of it, on all tensor-parallel ranks together.

    Attributes:
        weights: elements of the matrices that it meets.
        fused: of ``weights``, those whose gradient comes with the input's, whatever schedules say.
        core: operations that have no weights, as of attention: forward once, and twice for I.
        again: operations that are run again in the backward pass, where single parts are.
        widths: of what enters and of what leaves the matrices, but those of ``fused``.
        elements: kept for the backward pass.
        masks: bytes kept of the dropouts.
    """

    weights: int = 0
    fused: int = 0
    core: int = 0
    again: int = 0
    widths: int = 0
    elements: float = 0.0
    masks: int = 0

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, number: int) -> LayerWork:
        return LayerWork(*(number * figure for figure in astuple(self)))


@dataclass(frozen=True)
class ModelDimensions:
    """One microbatch through a dense GPT, per tensor-parallel and context-parallel rank.

    Attributes:
        layers: transformer layers per stage.
        work: of the layers of each stage, where it is not that of so many `transformer_layer`s.
        hidden, ffn_hidden, query_width, key_value_width: widths.
        gated: whether the MLP has a gate (SwiGLU): one more matrix.
        heads: attention heads.
        sequence, micro_batch: tokens of a microbatch on this rank are their product.
        vocabulary: rows of the output layer, on the last stage.
        depths: of multi-token prediction. Each is, on the last stage, a projection of two widths to
            one, a transformer layer, and one more run of the output layer.
        element_bytes: 2 for bf16 and fp16, 4 for fp32.
        recompute: whether whole layers are run again in the backward pass.
        recompute_modules: which parts of them are, by Megatron's names: ``layernorm``, ``mlp`` and
            ``core_attn`` count here.
        fused_attention: whether the attention matrix is never stored.
        sequence_parallel: whether tensor-parallel ranks divide what goes from stage to stage.
        context_parallel: ranks that divide a sample: attention looks at the tokens of all.
        captured: which parts of layers are in CUDA graphs, and have whole backwards, by Megatron's
            names: ``attn``, ``mlp``, ``moe``, ``moe_router`` (with the shared expert), ``mamba``.
    """

    layers: Sequence[int]
    hidden: int
    ffn_hidden: int
    query_width: int
    key_value_width: int
    gated: bool
    heads: int
    sequence: int
    micro_batch: int
    vocabulary: int
    tensor_parallel: int = 1
    element_bytes: int = 2
    recompute: bool = False
    recompute_modules: frozenset[str] = frozenset()
    fused_attention: bool = True
    sequence_parallel: bool = True
    context_parallel: int = 1
    depths: int = 0
    work: Sequence[LayerWork] = ()
    captured: frozenset[str] = frozenset()


def transformer_layer(model: ModelDimensions) -> LayerWork:
    """Attention and an MLP: 34 bytes are kept for each unit of width in a GPT of 16 bits, 20 with
    norms, activations and dropout run again (Korthikanti et al. 2022, Wan et al. 2025)."""
    return attention(model) + mlp(model)


def attention(model: ModelDimensions) -> LayerWork:
    """Causal attention, with the norm before it: half of its matrix counts."""
    query, key_value = model.query_width, model.key_value_width
    looked_at = model.sequence * model.context_parallel
    core = 2 * looked_at * query
    is_core_again = "core_attn" in model.recompute_modules
    elements = normed(model) + 2.0 * (query + key_value)  # the core's inputs, and its output
    if not model.fused_attention and not is_core_again:
        elements += 2.5 * model.heads * looked_at
    work = LayerWork(
        weights=model.hidden * (query + 2 * key_value) + query * model.hidden,
        core=core,
        again=core if is_core_again else 0,
        widths=model.hidden + query + query + 2 * key_value + model.hidden,
        elements=elements,
        masks=model.hidden,
    )
    return unsplit(work) if "attn" in model.captured else work


def mlp(model: ModelDimensions) -> LayerWork:
    """A dense MLP, with the norm before it."""
    weights = (3 if model.gated else 2) * model.hidden * model.ffn_hidden
    is_again = "mlp" in model.recompute_modules
    activation = (3 if model.gated else 2) * model.ffn_hidden  # its input, and its output
    work = LayerWork(
        weights=weights,
        again=2 * weights if is_again else 0,
        widths=2 * model.hidden + (3 if model.gated else 2) * model.ffn_hidden,
        elements=normed(model) + (0 if is_again else activation),
        masks=model.hidden,
    )
    return unsplit(work) if "mlp" in model.captured else work


def unsplit(work: LayerWork) -> LayerWork:
    """``work`` with a whole backward, which leaves nothing to W."""
    return replace(work, fused=work.weights, widths=0)


def normed(model: ModelDimensions) -> int:
    """Elements that are kept of a norm's input, and of its output, which enters matrices."""
    return (1 if "layernorm" in model.recompute_modules else 2) * model.hidden


def estimate(model: ModelDimensions, rates: Rates) -> Costs:
    """Seconds and bytes of each stage of ``model`` at ``rates``."""
    tokens = model.sequence * model.micro_batch
    share = 1 / model.tensor_parallel
    layer = transformer_layer(model)
    depths = [0] * (len(model.layers) - 1) + [model.depths]
    work = model.work or [layer * count for count in model.layers]
    work = [stage + layer * d for stage, d in zip(work, depths, strict=True)]
    counts = [count + d for count, d in zip(model.layers, depths, strict=True)]
    projection = 2 * tokens * 2 * model.hidden * model.hidden * share
    projections = [d * projection for d in depths]
    head = 2 * tokens * model.hidden * model.vocabulary * share * (1 + model.depths)

    products = [2 * tokens * stage.weights * share for stage in work]
    fused = [2 * tokens * stage.fused * share for stage in work]
    core = [tokens * stage.core * share for stage in work]
    again = [tokens * stage.again * share for stage in work]
    forward = [p + c + d for p, c, d in zip(products, core, projections, strict=True)]
    if model.recompute:
        again = forward
    input_gradient = [
        p + 2 * c + d + a + w
        for p, c, d, a, w in zip(products, core, projections, again, fused, strict=True)
    ]
    weight_gradient = [p + d - w for p, d, w in zip(products, projections, fused, strict=True)]

    def seconds(operations: list[float]) -> tuple[float, ...]:
        return tuple(o / rates.operations for o in operations)

    boundary = tokens * model.hidden * model.element_bytes
    message = boundary * (share if model.sequence_parallel else 1.0)
    stored = [
        (stage.elements * model.element_bytes + stage.masks) * tokens * share for stage in work
    ]
    # The projection's input, and what the norms before and after it and the layer have as theirs;
    # or what is looked up, where the rest is run again.
    of_depth = boundary if model.recompute else 4 * boundary * share
    of_projection = 3 * boundary * share
    costs = Costs(
        {
            Kind.FORWARD: seconds(forward),
            Kind.BACKWARD_INPUT: seconds(input_gradient),
            Kind.BACKWARD_WEIGHT: seconds(weight_gradient),
        },
        hop=message / rates.bytes,
        held_bytes={
            Held.ACTIVATION: tuple(
                (n * boundary if model.recompute else kept) + d * of_depth
                for n, kept, d in zip(counts, stored, depths, strict=True)
            ),
            Held.WEIGHT_INPUTS: tuple(
                stage.widths * tokens * model.element_bytes * share + d * of_projection
                for stage, d in zip(work, depths, strict=True)
            ),
        },
        origin="estimated from the model's dimensions",
        message_bytes=message,
    )
    # The embedding is no matrix product.
    head_seconds = head / rates.operations
    logits = tokens * model.vocabulary * 4 * share * (1 + model.depths)
    costs = costs.with_vocabulary(
        VocabularyCosts((head_seconds, head_seconds, head_seconds), logits_bytes=logits)
    )
    assert costs.held_bytes is not None
    copies = [held / rates.host for held in costs.held_bytes[Held.ACTIVATION]]
    return costs.with_host(copies, copies)
