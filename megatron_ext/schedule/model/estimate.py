"""Costs estimated from a model's dimensions, for want of measured ones.

Operations are counted as in Megatron's own papers (Narayanan et al. 2021, appendix; Korthikanti et
al. 2022, section 4 for bytes): a matrix product costs the same forward, for its input gradient and
for its weight gradient; the attention core has no weights, so its backward is all input gradient.
Only ratios matter to a schedule; `Rates` turn operations and bytes into seconds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs, VocabularyCosts
from megatron_ext.schedule.kinds import RULES, Held


@dataclass(frozen=True)
class Rates:
    """What a rank reaches: floating-point operations, message bytes, bytes to the host or back
    (each way at once), and bytes to the other tensor-parallel ranks per second."""

    operations: float
    bytes: float
    host: float
    peers: float


# bf16 on one H100, one InfiniBand NDR port. PCIe 5 x16 carries some 50e9 bytes one way; two GPUs
# often share a switch, and both directions the host's memory: half of it. NVLink carries 450e9 one
# way, of which collectives reach two thirds.
GPU = Rates(operations=400e12, bytes=40e9, host=25e9, peers=300e9)
# One core, gloo over loopback, its memory.
CPU = Rates(operations=20e9, bytes=1e9, host=5e9, peers=1e9)


@dataclass(frozen=True)
class LayerWork:
    """What layers do with a token, and keep of it, on all tensor-parallel ranks together.

    Attributes:
        weights: elements of the matrices that it meets.
        fused: of ``weights``, those whose gradient comes with the input's, whatever schedules say.
        core: operations that have no weights, as of attention: forward once, and twice for I.
        again: operations that are run again in the backward pass, where single parts are.
        widths: of what enters and of what leaves the matrices, but those of ``fused``.
        whole: of ``widths``, those that each tensor-parallel rank has whole: in halves the inputs
            of `Pair`s' first matrices, and the gradients of the last ones' outputs.
        exchanged: widths that these ranks wait for one another for in F, and again in I.
        rows: elements of pairs' last matrices whose gradient may wait for W.
        elements: kept for the backward pass.
        masks: bytes kept of the dropouts.
    """

    weights: int = 0
    fused: int = 0
    core: int = 0
    again: int = 0
    widths: int = 0
    whole: int = 0
    exchanged: int = 0
    rows: int = 0
    elements: float = 0.0
    masks: int = 0

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, number: int) -> LayerWork:
        return LayerWork(*(number * figure for figure in astuple(self)))


@dataclass(frozen=True)
class Pair:
    """Matrices that tensor-parallel ranks divide: first ones by columns, which share their input,
    and a last one by rows, whose output is summed. They communicate once before, once after.

    Attributes:
        weights: elements of all.
        widths: of what enters and of what leaves them.
        rows: elements of the last.
        row_input: its input's width.
    """

    weights: int
    widths: int
    rows: int
    row_input: int


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
        gathers_again: what W gathers again with a share of the sequence, which is kept: ``inputs``
            of pairs, as Megatron's local layers do, and ``gradients`` of their outputs, as
            Transformer Engine's do too.
        userbuffers: of pairs whose products overlap their communication, which matrices keep whole
            backwards for it: ``column``, ``row``. Empty: they wait for communication.
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
    gathers_again: frozenset[str] = frozenset(["inputs", "gradients"])
    userbuffers: frozenset[str] = frozenset()


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
    weights = model.hidden * (query + 2 * key_value) + query * model.hidden
    widths = model.hidden + query + query + 2 * key_value + model.hidden
    work = LayerWork(
        weights=weights,
        core=core,
        again=core if is_core_again else 0,
        widths=widths,
        elements=elements,
        masks=model.hidden,
    )
    work = divided(work, model, Pair(weights, widths, query * model.hidden, query))
    return unsplit(work) if "attn" in model.captured else work


def mlp(model: ModelDimensions) -> LayerWork:
    """A dense MLP, with the norm before it."""
    weights = (3 if model.gated else 2) * model.hidden * model.ffn_hidden
    is_again = "mlp" in model.recompute_modules
    activation = (3 if model.gated else 2) * model.ffn_hidden  # its input, and its output
    widths = 2 * model.hidden + (3 if model.gated else 2) * model.ffn_hidden
    work = LayerWork(
        weights=weights,
        again=2 * weights if is_again else 0,
        widths=widths,
        elements=normed(model) + (0 if is_again else activation),
        masks=model.hidden,
    )
    rows = model.ffn_hidden * model.hidden
    work = divided(work, model, Pair(weights, widths, rows, model.ffn_hidden))
    return unsplit(work) if "mlp" in model.captured else work


def unsplit(work: LayerWork) -> LayerWork:
    """``work`` with a whole backward, which leaves nothing to W."""
    return replace(work, fused=work.weights, widths=0, whole=0, rows=0)


def divided(work: LayerWork, model: ModelDimensions, pair: Pair) -> LayerWork:
    """``work``, of which ``pair`` is what tensor-parallel ranks divide."""
    if model.tensor_parallel == 1:
        return work
    shared = 2 * model.hidden
    if not model.userbuffers:
        return replace(work, whole=shared, exchanged=shared, rows=pair.rows)
    if "column" in model.userbuffers:
        return replace(work, fused=pair.weights, widths=work.widths - pair.widths)
    left = work.widths - pair.row_input - model.hidden
    return replace(work, fused=pair.rows, widths=left, whole=model.hidden)


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
                _weight_inputs(stage, model) * tokens * model.element_bytes + d * of_projection
                for stage, d in zip(work, depths, strict=True)
            ),
        },
        origin="estimated from the model's dimensions",
        message_bytes=message,
    )
    exchange = boundary * (1 - share) / rates.peers  # one, of a width, among all ranks
    if any(stage.exchanged for stage in work):
        exchanges = [exchange * stage.exchanged / model.hidden for stage in work]
        rows = seconds([2 * tokens * stage.rows * share for stage in work])
        costs = _with_exchanges(costs, exchanges, rows, model)
    # The embedding is no matrix product.
    head_seconds = head / rates.operations
    logits = tokens * model.vocabulary * 4 * share * (1 + model.depths)
    runs = (1 + model.depths) if model.vocabulary else 0
    of_head = exchange * runs  # its input's gradient, and the input in parts
    head_forward, head_back = (1, 1) if model.sequence_parallel else (0, 2)
    costs = costs.with_vocabulary(
        VocabularyCosts(
            (
                head_seconds + head_forward * of_head,
                head_seconds + head_back * of_head,
                head_seconds,
            ),
            logits_bytes=logits,
        )
    )
    assert costs.held_bytes is not None
    copies = [held / rates.host for held in costs.held_bytes[Held.ACTIVATION]]
    return costs.with_host(copies, copies)


def _weight_inputs(work: LayerWork, model: ModelDimensions) -> float:
    """Widths that wait for W on a rank."""
    share = 1 / model.tensor_parallel
    kinds = 2 - len(model.gathers_again) if model.sequence_parallel else 2  # that stay whole
    return work.widths * share + work.whole / 2 * kinds * (1 - share)


def _with_exchanges(
    costs: Costs, exchanges: Sequence[float], rows: Sequence[float], model: ModelDimensions
) -> Costs:
    """``costs``, and what tensor-parallel ranks wait for one another.

    A pair of matrices gathers before the first and scatters after the second, or sums in two such
    halves, in F, and the other way round in I. In W what is gathered again comes beside the product
    before. A whole B has the weight gradients of second matrices (``rows``) beside the reductions
    of I, and so have I and W that follow one another.

    Args:
        exchanges: seconds of F's, by stage.
        rows: seconds of weight gradients of second matrices.
    """
    runs = 2 if model.recompute else 1  # of F's, in I
    more = {
        Kind.FORWARD: exchanges,
        Kind.BACKWARD_INPUT: [e * runs for e in exchanges],
        Kind.BACKWARD_WEIGHT: [0.0] * len(exchanges),
    }
    seconds = {
        kind: tuple(map(operator.add, figures, more[kind]))
        for kind, figures in costs.seconds.items()
    }
    if model.sequence_parallel:
        products = seconds[Kind.BACKWARD_WEIGHT]
        gathers = [len(model.gathers_again) * e / 2 for e in exchanges]
        seconds[Kind.BACKWARD_WEIGHT] = tuple(map(max, products, gathers))
    reductions = [e / 2 if model.sequence_parallel else e for e in exchanges]
    return replace(costs, seconds=seconds, spared=tuple(map(min, reductions, rows)))


def exchange_shares(model: ModelDimensions, rates: Rates) -> dict[str, float]:
    """Which part of F, I, W and B of all stages together is waiting for tensor-parallel ranks."""
    with_exchanges, without = (
        estimate(model, r).without_vocabulary() for r in (rates, replace(rates, peers=math.inf))
    )

    def total(costs: Costs, kind: Kind) -> float:
        return sum(costs.of(Action(stage, kind, 0)) for stage in range(costs.stages))

    shares = {}
    for kind in (Kind.FORWARD, *RULES[Kind.FULL_BACKWARD].covers, Kind.FULL_BACKWARD):
        whole = total(with_exchanges, kind)
        shares[kind.value] = 1 - total(without, kind) / whole if whole else 0.0
    return shares
