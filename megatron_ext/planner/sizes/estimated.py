"""Closed-form estimates of a step for all sizes, schedules and recompute of a job.

A step takes the work of the fullest rank and the bubble of its schedule:

    microbatches x (seconds of the fullest rank) + bubble + (optimizer and exposed reductions)

Layers are balanced here, and alike: of several types each counts as their mean. The estimate
orders what is simulated afterwards, and no figure of it is printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, floor, inf

from megatron_ext.cost_model.activations import held_of_stage
from megatron_ext.cost_model.context import context_bytes
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Framework
from megatron_ext.cost_model.model import Stage
from megatron_ext.cost_model.model_memory import ModelBytes, TrainingState
from megatron_ext.cost_model.operations.temporaries import temporary_bytes
from megatron_ext.cost_model.parameters import Parameter, parameters_of_stage
from megatron_ext.planner.layouts.recompute import FULL, LayerRecompute
from megatron_ext.planner.outside_passes import RankPasses, seconds_outside_passes
from megatron_ext.planner.sizes.job import SizedJob
from megatron_ext.planner.sizes.sizes import Sizes
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import VocabularyCosts
from megatron_ext.schedule.kinds import Held

_MOST_CHUNKS = 8
_NODE = 8  # GPUs


@dataclass(frozen=True)
class Estimated:
    """A schedule with sizes and recompute.

    Attributes:
        is_stock: whether Megatron has the schedule itself.
        seconds: of a step.
        excess: bytes of the fullest rank beyond what it may take; 0 if it fits.
        offloaded: seconds of a step that copies the excess to the host and back.
    """

    sizes: Sizes
    recompute: LayerRecompute
    spec: str
    is_stock: bool
    seconds: float
    excess: float
    offloaded: float


@dataclass(frozen=True)
class _Piece:
    """Seconds of a microbatch's F, I and W, and the bytes that it leaves."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    activation: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True)
class _Pieces:
    """A mean layer, what the first and the last stage have besides, and the bytes of a message."""

    layer: _Piece
    first: _Piece
    last: _Piece
    message_bytes: float


class Estimator:
    """Estimates of a step of a job for any of its sizes.

    Sizes that differ only in pipeline and data parallelism have the same pieces: a layer, and what
    the ends of a pipeline have besides. These are estimated once.
    """

    def __init__(self, job: SizedJob) -> None:
        self._job = job
        self._recompute = sorted(job.recompute, key=amount_of)
        self._models: dict[Sizes, ModelBytes] = {}
        self._pieces: dict[tuple[Sizes, LayerRecompute], _Pieces] = {}
        self._activations: dict[tuple[Sizes, LayerRecompute], float] = {}
        self._temporary: dict[tuple[Sizes, LayerRecompute, bool], float] = {}

    def bound(self, sizes: Sizes) -> float:
        """Return seconds that no step with ``sizes`` beats: the work of all layers without
        recompute, on ranks that never wait. Infinite if the model alone is too large for a rank."""
        job = self._job
        left = self.left(sizes)
        if left is not None and left <= 0:
            return inf
        layer = self.pieces(sizes, self._recompute[0]).layer.seconds
        return job.microbatches(sizes) * len(job.model.layers) * layer / sizes.pipeline

    def estimates(self, sizes: Sizes, worse_than: float = inf) -> Iterator[Estimated]:
        """Estimate a step with ``sizes`` for each recompute and schedule; nothing if none fits.

        More recompute takes longer: none is estimated beyond that with which all schedules fit, or
        with which all take more seconds than ``worse_than``.
        """
        job = self._job
        if not self._may_fit(sizes):
            return
        for recompute in self._recompute:
            made = list(_Sized(self, job, sizes, recompute).estimates())
            yield from made
            fits = not any(one.excess for one in made)
            if fits or min(one.seconds for one in made) > worse_than:
                return

    def _may_fit(self, sizes: Sizes) -> bool:
        """Whether a rank has memory for its layers with some recompute, under the schedule that
        holds least."""
        job, free = self._job, self.left(sizes)
        if free is None:
            return True
        held = min(_least_in_flight(sizes.pipeline), job.microbatches(sizes))
        layers = held * len(job.model.layers) / sizes.pipeline
        return any(layers * self._activation(sizes, one) <= free for one in self._recompute[::-1])

    def _activation(self, sizes: Sizes, recompute: LayerRecompute) -> float:
        """Return the bytes that a microbatch leaves in a mean layer."""
        key = replace(sizes, pipeline=1), recompute
        if key not in self._activations:
            job = self._job
            types = Counter(job.model.layers)
            model, execution = (
                replace(job.model_of(sizes), layers=tuple(types)),
                job.execution_of(sizes, recompute),
            )
            number = sum(types.values())
            self._activations[key] = sum(
                count
                / number
                * held_of_stage(model, Stage((layer,)), execution, job.rates.measured)[0]
                for layer, count in types.items()
            )
        return self._activations[key]

    def left(self, sizes: Sizes) -> float | None:
        """Return the bytes that the model leaves for activations and temporary tensors on the
        fullest rank; None: unknown."""
        model = self.model_bytes(sizes)
        room = self._job.memory_of([model])
        return None if room is None else room - model.total

    def model_bytes(self, sizes: Sizes) -> ModelBytes:
        """Return the bytes of the model, without temporary tensors, on the fullest rank."""
        if sizes not in self._models:
            self._models[sizes] = _model_bytes(self._job, sizes)
        return self._models[sizes]

    def pieces(self, sizes: Sizes, recompute: LayerRecompute) -> _Pieces:
        """Return the pieces of a stage."""
        key = replace(sizes, pipeline=1), recompute
        if key not in self._pieces:
            self._pieces[key] = _pieces(self._job, sizes, recompute)
        return self._pieces[key]

    def temporary(self, sizes: Sizes, recompute: LayerRecompute) -> float:
        """Return the bytes of temporary tensors on the fullest rank: the first one, which has the
        output layer only if it is alone."""
        job, is_alone = self._job, sizes.pipeline == 1
        key = replace(sizes, pipeline=1), recompute, is_alone
        if key not in self._temporary:
            stage = Stage(tuple(dict.fromkeys(job.model.layers)), head=is_alone)
            execution = job.execution_of(sizes, recompute)
            self._temporary[key] = temporary_bytes(job.model_of(sizes), stage, execution)
        return self._temporary[key]


def _least_in_flight(ranks: int) -> int:
    """Return the microbatches that the fullest rank holds under the schedule with the least."""
    return (ranks + 2) // 2 if ranks > 1 else 1


def amount_of(recompute: LayerRecompute) -> tuple[bool, int]:
    """Return a key that orders recompute by its amount."""
    return recompute.granularity == FULL, len(recompute.modules) + recompute.num_layers


def _model_bytes(job: SizedJob, sizes: Sizes) -> ModelBytes:
    """Return the bytes of the model on the fullest rank."""
    on_rank = ceil(len(job.model.layers) / sizes.pipeline)
    layer, first, last = _parameters(job, sizes.tensor, sizes.expert, sizes.expert_tensor)
    state = job.state_of(sizes)
    ends = max(first, last, key=lambda parts: sum(parts[:2]))
    if sizes.pipeline == 1:
        ends = tuple(map(sum, zip(first, last, strict=True)))
    dense, experts = (on_rank * layer[n] + ends[n] for n in range(2))
    context = context_bytes(
        job.execution_of(sizes, job.recompute[0]),
        pipeline=sizes.pipeline,
        data_parallel=state.data_parallel,
        expert_data_parallel=state.expert_data_parallel,
    )
    model = ModelBytes(0, 0, 0, context=context)
    model = _with_elements(model, dense, on_rank * layer[2], False, state)
    return _with_elements(model, experts, 0.0, True, state)


class _Sized:
    """A job with sizes and recompute."""

    def __init__(
        self, estimator: Estimator, job: SizedJob, sizes: Sizes, recompute: LayerRecompute
    ) -> None:
        self._job, self._sizes, self._recompute = job, sizes, recompute
        self._pieces = estimator.pieces(sizes, recompute)
        self._layers = len(job.model.layers)
        self._ranks, self._microbatches = sizes.pipeline, job.microbatches(sizes)
        near, far = (self._pieces.message_bytes / speed for speed in job.rates.to_neighbours)
        share = min(job.stride(sizes) / _NODE, 1.0) if job.gpus > _NODE else 0.0
        self._message = near + share * (far - near)
        model, execution = estimator.model_bytes(sizes), job.execution_of(sizes, recompute)
        on_ranks = self._layers / self._ranks
        forward = on_ranks * self._pieces.layer.forward
        backward = on_ranks * self._pieces.layer.seconds - forward
        self._outside = seconds_outside_passes(
            model, job.state_of(sizes), execution, job.rates, RankPasses(forward, backward)
        )
        self._free = estimator.left(sizes)
        if self._free is not None:
            self._free -= estimator.temporary(sizes, recompute)

    def estimates(self) -> Iterator[Estimated]:
        ranks, microbatches = self._ranks, self._microbatches
        layer = self._pieces.layer
        forward = (self._layers * layer.forward) / ranks
        weight = (self._layers * layer.weight_gradient) / ranks
        work = (self._layers * layer.seconds) / ranks
        backward = work - forward - weight
        hops = 2 * (ranks - 1) * self._message
        if ranks == 1:
            yield self._made("1f1b", True, 0.0, 1)
            return
        yield self._made("1f1b", True, (ranks - 1) * work + hops, ranks)
        bubble = (ranks - 1) * max(forward + backward - weight, 0.0) + hops
        yield self._made("zb-1p", False, bubble, ranks)
        most = min(_MOST_CHUNKS, (self._layers + 1) // ranks)
        if microbatches >= ranks:
            for chunks in range(2, most + 1):
                in_flight = ranks + (ranks - 1) / chunks
                bubble = (ranks - 1) * work / chunks + hops
                spec = f"interleaved:vpp={chunks}"
                yield self._made(spec, True, bubble, in_flight, chunks=chunks)
                bubble = (ranks - 1) * max(forward + backward - weight, 0.0) / chunks + hops
                spec = f"interleaved-zb:vpp={chunks}"
                yield self._made(spec, False, bubble, in_flight, chunks=chunks)
        if most >= 2:
            way = (ranks - 1) * forward / 2 + hops
            yield self._made("zb-v", False, way, ranks, chunks=2, is_v=True)
            way += (ranks - 1) * work / 3
            least = _least_in_flight(ranks)
            yield self._made("v-half", False, way, least, chunks=2, is_v=True)

    def _made(
        self,
        spec: str,
        is_stock: bool,
        bubble: float,
        in_flight: float,
        *,
        chunks: int = 1,
        is_v: bool = False,
    ) -> Estimated:
        """Args: ``bubble`` in seconds, ``in_flight``: microbatches that the fullest rank holds,
        ``chunks``: of a rank, ``is_v``: whether the first and the last stage are on one rank."""
        pieces, ranks = self._pieces, self._ranks
        layer, first, last = pieces.layer.seconds, pieces.first.seconds, pieces.last.seconds
        ends = [first + last, 0.0] if is_v or ranks == 1 else [first, last]
        slowest = least_maximum(self._layers, layer, tuple(ends), ranks)
        if self._job.execution.framework is Framework.PYTORCH:
            slowest += 2 * self._message * (ranks > 1)
        slowest += 2 * self._job.rates.launch * chunks
        seconds = self._microbatches * slowest + bubble + self._outside
        excess = copies = 0.0
        if self._free is not None:
            at_once = min(in_flight, self._microbatches)
            activations = at_once * self._layers / ranks * pieces.layer.activation
            if ranks == 1:
                activations += pieces.first.activation + pieces.last.activation
            excess = max(activations - self._free, 0.0)
            copies = self._microbatches * excess / at_once / self._job.rates.host
        return Estimated(
            self._sizes, self._recompute, spec, is_stock, seconds, excess, max(seconds, copies)
        )


@cache
def least_maximum(layers: int, layer: float, ends: tuple[float, ...], ranks: int) -> float:
    """Return the least time of the slowest of ``ranks`` that share ``layers`` of ``layer`` seconds,
    if the first ranks have ``ends`` besides."""
    ends = ends[:ranks]
    others = ranks - len(ends)
    candidates = {end + n * layer for end in (*ends, 0.0) for n in range(layers + 1)}
    least = max((layers * layer + sum(ends)) / ranks, max(ends, default=0.0)) * (1 - 1e-9)
    for cap in sorted(c for c in candidates if c >= least):
        room = others * floor(cap / layer + 1e-9)
        room += sum(max(floor((cap - end) / layer + 1e-9), 0) for end in ends)
        if room >= layers:
            return cap
    raise AssertionError(f"{layers} layers fit nowhere")


def _pieces(job: SizedJob, sizes: Sizes, recompute: LayerRecompute) -> _Pieces:
    model, execution = job.model_of(sizes), job.execution_of(sizes, recompute)
    types = Counter(model.layers)
    model = replace(model, layers=tuple(types))  # which is hashed for each of its operations
    kinds = [Stage((layer,)) for layer in types]
    depths = Stage(model.layers[-1:], depths=model.mtp_num_layers, head=True)
    stages = (Stage(model.layers[:1], embedding=True), *kinds, depths)
    costs = estimate(model, stages, execution, job.rates)
    ends = costs.vocabulary or VocabularyCosts()
    tower = costs.tower
    layers = costs.layers_alone
    assert layers.held_bytes is not None
    launch = job.rates.launch  # of a pass, however many layers it has

    def of(stage: int) -> _Piece:
        held = layers.held_bytes
        assert held is not None
        return _Piece(
            layers.seconds[Kind.FORWARD][stage] - launch,
            layers.seconds[Kind.BACKWARD_INPUT][stage] - layers.spared_on(stage) - launch,
            layers.seconds[Kind.BACKWARD_WEIGHT][stage],
            held[Held.ACTIVATION][stage],
        )

    number = sum(types.values())
    shares = [count / number for count in types.values()]
    of_kinds = [of(stage + 1) for stage in range(len(kinds))]
    mean = _Piece(
        *(
            sum(share * getattr(piece, name) for share, piece in zip(shares, of_kinds, strict=True))
            for name in ("forward", "input_gradient", "weight_gradient", "activation")
        )
    )
    lookup, table_gradient = ends.embedding
    first = _Piece(lookup, 0.0, table_gradient)
    if tower is not None:
        first = replace(
            first,
            forward=lookup + tower.seconds[0],
            input_gradient=tower.seconds[1],
            weight_gradient=table_gradient + tower.seconds[2],
            activation=tower.activation,
        )
    with_depths, last_layer = of(len(stages) - 1), of_kinds[-1]
    last = _Piece(
        ends.head[0] + with_depths.forward - last_layer.forward,
        ends.head[1] + with_depths.input_gradient - last_layer.input_gradient,
        ends.head[2] + with_depths.weight_gradient - last_layer.weight_gradient,
        ends.logits_bytes + with_depths.activation - last_layer.activation,
    )
    return _Pieces(mean, first, last, costs.links.message_bytes)


Elements = tuple[float, ...]  # of dense parameters, of experts', and of the first those in matrices


@cache
def _parameters(
    job: SizedJob, tensor: int, expert: int, expert_tensor: int
) -> tuple[Elements, Elements, Elements]:
    """Return the elements of a mean layer, and what the first and the last stage have besides."""
    sizes = replace(job.own, tensor=tensor, expert=expert, expert_tensor=expert_tensor)
    model = job.model_of(sizes)
    execution = job.execution_of(sizes, job.recompute[0])

    def of(stage: Stage) -> Elements:
        parameters = list(parameters_of_stage(model, stage, execution))
        return _counted(parameters)

    types = Counter(model.layers)
    number = sum(types.values())
    layer = [0.0, 0.0, 0.0]
    for kind, count in types.items():
        for position, elements in enumerate(of(Stage((kind,)))):
            layer[position] += elements * count / number
    first = of(Stage((), embedding=True))
    last = of(Stage((), depths=model.mtp_num_layers, head=True))
    return tuple(layer), first, last


def _counted(parameters: list[Parameter]) -> Elements:
    dense = sum(p.elements for p in parameters if not p.of_experts)
    experts = sum(p.elements for p in parameters if p.of_experts)
    matrices = sum(p.elements for p in parameters if p.is_matrix)
    return float(dense), float(experts), float(matrices)


def _with_elements(
    model: ModelBytes,
    number: float,
    matrices: float,
    is_expert: bool,
    state: TrainingState,
) -> ModelBytes:
    """Return ``model`` with ``number`` more elements, of which ``matrices`` may be in 8 bits."""
    copies = state.expert_data_parallel if is_expert else state.data_parallel
    more = 0.0 if state.matrix_bytes is None else state.matrix_bytes - state.weight_bytes
    weights = number * state.weight_bytes + matrices * more
    gradients = number * state.gradient_bytes
    shared = number / copies if state.distributed else number
    return ModelBytes(
        model.weights + weights,
        model.gradients + gradients,
        model.optimizer + shared * state.optimizer_bytes,
        model.expert_weights + weights * is_expert,
        model.expert_gradients + gradients * is_expert,
        context=model.context,
    )
