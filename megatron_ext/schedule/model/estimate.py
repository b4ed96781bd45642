"""Costs estimated from a model's dimensions, for want of measured ones.

Operations are counted as in Megatron's own papers (Narayanan et al. 2021, appendix; Korthikanti et
al. 2022, section 4 for bytes): a matrix product costs the same forward, for its input gradient and
for its weight gradient; the attention core has no weights, so its backward is all input gradient.
Only ratios matter to a schedule; `Rates` turn operations and bytes into seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
class ModelDimensions:
    """One microbatch through a dense GPT, per tensor-parallel rank.

    Attributes:
        layers: transformer layers per stage.
        hidden, ffn_hidden, query_width, key_value_width: widths.
        gated: whether the MLP has a gate (SwiGLU): one more matrix.
        heads: attention heads.
        sequence, micro_batch: tokens of a microbatch are their product.
        vocabulary: rows of the output layer, on the last stage.
        depths: of multi-token prediction. Each is, on the last stage, a projection of two widths to
            one, a transformer layer, and one more run of the output layer.
        element_bytes: 2 for bf16 and fp16, 4 for fp32.
        recompute: whether whole layers are run again in the backward pass.
        recompute_modules: which parts of them are, by Megatron's names: ``layernorm``, ``mlp`` and
            ``core_attn`` count here.
        fused_attention: whether the attention matrix is never stored.
        sequence_parallel: whether tensor-parallel ranks divide what goes from stage to stage.
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
    depths: int = 0


def weights_of_layer(model: ModelDimensions) -> int:
    """Elements of a layer's four (or five) matrices."""
    return (
        model.hidden * (model.query_width + 2 * model.key_value_width)
        + model.query_width * model.hidden
        + (3 if model.gated else 2) * model.hidden * model.ffn_hidden
    )


def estimate(model: ModelDimensions, rates: Rates) -> Costs:
    """Seconds and bytes of each stage of ``model`` at ``rates``."""
    tokens = model.sequence * model.micro_batch
    # widths of what enters and of what leaves the four (or five) matrices of a layer
    inputs = model.hidden + model.query_width + model.hidden + model.ffn_hidden
    outputs = (
        model.query_width
        + 2 * model.key_value_width
        + model.hidden
        + (2 if model.gated else 1) * model.ffn_hidden
        + model.hidden
    )
    weights = weights_of_layer(model)
    share = 1 / model.tensor_parallel
    products = 2 * tokens * weights * share
    layers = [*model.layers[:-1], model.layers[-1] + model.depths]
    depths = [0] * (len(layers) - 1) + [model.depths]
    projection = 2 * tokens * 2 * model.hidden * model.hidden * share
    core = 4 * tokens * model.sequence * model.query_width * share / 2  # causal: half the matrix
    head = 2 * tokens * model.hidden * model.vocabulary * share * (1 + model.depths)

    forward = [n * (products + core) + d * projection for n, d in zip(layers, depths, strict=True)]
    of_mlp = 2 * tokens * (3 if model.gated else 2) * model.hidden * model.ffn_hidden * share
    of_parts = {"mlp": of_mlp, "core_attn": core}
    parts = sum(of_parts.get(name, 0.0) for name in model.recompute_modules)
    again = forward if model.recompute else [n * parts for n in layers]
    input_gradient = [
        n * (products + 2 * core) + d * projection + a
        for n, d, a in zip(layers, depths, again, strict=True)
    ]
    weight_gradient = [n * products + d * projection for n, d in zip(layers, depths, strict=True)]

    def seconds(operations: list[float]) -> tuple[float, ...]:
        return tuple(o / rates.operations for o in operations)

    boundary = tokens * model.hidden * model.element_bytes
    message = boundary * (share if model.sequence_parallel else 1.0)
    stored = _stored_bytes_of_token(model) * tokens * share
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
                n * (boundary if model.recompute else stored) + d * of_depth
                for n, d in zip(layers, depths, strict=True)
            ),
            Held.WEIGHT_INPUTS: tuple(
                n * (inputs + outputs) * tokens * model.element_bytes * share + d * of_projection
                for n, d in zip(layers, depths, strict=True)
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


def _stored_bytes_of_token(model: ModelDimensions) -> float:
    """What a layer stores of a token for its backward pass: 34 bytes for each of ``hidden`` in a
    GPT of 16 bits, 20 with norms, activations and dropout run again (Korthikanti et al. 2022, Wan
    et al. 2025)."""
    again = model.recompute_modules
    elements = 2 * model.hidden  # the norms' inputs
    elements += 2 * (model.query_width + model.key_value_width)  # the attention core's, and output
    if "layernorm" not in again:
        elements += 2 * model.hidden
    if "mlp" not in again:
        elements += (3 if model.gated else 2) * model.ffn_hidden  # the activation's input, output
    stored = float(elements * model.element_bytes)
    if not model.fused_attention and "core_attn" not in again:
        stored += 2.5 * model.heads * model.sequence * model.element_bytes
    return stored + 2 * model.hidden  # the dropouts' masks
