"""Order of all sizes, schedules and recompute of a job, by a formula over costs of stages.

A step takes the work of the fullest rank and the bubble of its schedule:

    microbatches x (seconds of the fullest rank) + bubble + (optimizer and exposed reductions)

Seconds and bytes of a layer and of the ends are those that layouts are compared by. Layers are
spread evenly here, and are equal: each counts as the mean of all types. The best are simulated
afterwards, and no number of this formula is printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from math import ceil, floor, inf

import numpy as np

from megatron_ext.cost_model.context import context_bytes
from megatron_ext.cost_model.estimate import estimate, message_bytes
from megatron_ext.cost_model.execution import Framework
from megatron_ext.cost_model.model import Stage
from megatron_ext.cost_model.model_memory import ModelBytes, TrainingState, bytes_of_chunk
from megatron_ext.cost_model.operations.temporaries import temporary_bytes
from megatron_ext.planner.layouts.recompute import FULL, LayerRecompute
from megatron_ext.planner.layouts.stage_figures import Figure, busy, figures_of_stage
from megatron_ext.planner.outside_passes import RankPasses, seconds_outside_passes
from megatron_ext.planner.sizes.described_job import SizedJob
from megatron_ext.planner.sizes.sizes import Sizes
from megatron_ext.schedule.action_arrays import Floats

_MOST_CHUNKS = 8
_NODE = 8  # number of GPUs in a node
_SECONDS = [Figure.FORWARD, Figure.INPUT, Figure.WEIGHT]


@dataclass(frozen=True)
class Estimated:
    """Estimated step time and memory of a schedule with parallel sizes and recompute.

    Attributes:
        is_stock: whether Megatron has the schedule itself.
        seconds: seconds of a step.
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
class _Pieces:
    """Seconds and bytes of a mean layer, and of the parts that only the first or last stage has.

    No pass includes the seconds of its launch.
    """

    layer: Floats
    first: Floats
    last: Floats

    @property
    def activation(self) -> float:
        """Bytes of activations that a mean layer stores for a microbatch."""
        return float(self.layer[Figure.ACTIVATION])


class Estimator:
    """Estimates the step of a job for any parallel sizes, in closed form.

    Sizes that differ only in pipeline and data parallelism have the same pieces: a layer, and what
    the ends of a pipeline have in addition. Their seconds and bytes come from the planner's stages
    of one layer, and are computed once.
    """

    def __init__(self, job: SizedJob) -> None:
        types = Counter(job.model.layers)
        self._job, self._layers = job, sum(types.values())
        # The model described here has one layer of each type.
        self._of_types = replace(job, model=replace(job.model, layers=tuple(types)))
        self._shares = np.array([*types.values()]) / self._layers
        self._recompute = sorted(job.recompute, key=amount_of)
        # The results of these methods are cached as long as the training job's description lives.
        self.pieces = cache(self._pieces)
        self.model_bytes = cache(self._model_bytes)
        self._parts = cache(self._parts_of_model)

    def bound(self, sizes: Sizes) -> float:
        """Return a lower bound on the seconds of a step with these parallel ``sizes``.

        It is the work of all layers without recompute, on ranks that never wait. Infinite if the
        model alone is too large for a rank.
        """
        left = self.left(sizes)
        if left is not None and left <= 0:
            return inf
        layer = busy(self.pieces(replace(sizes, pipeline=1), self._recompute[0]).layer)
        return self._job.microbatches(sizes) * self._layers * float(layer) / sizes.pipeline

    def estimates(self, sizes: Sizes, worse_than: float = inf) -> Iterator[Estimated]:
        """Estimate a step with these parallel ``sizes`` for each recompute and schedule.

        Nothing is estimated if no schedule fits. More recompute takes longer: none is estimated
        beyond that with which all schedules fit, or with which all take more seconds than
        ``worse_than``.
        """
        if not self._may_fit(sizes):
            return
        for recompute in self._recompute:
            made = list(_Sized(self, self._job, sizes, recompute).estimates())
            yield from made
            fits = not any(one.excess for one in made)
            if fits or min(one.seconds for one in made) > worse_than:
                return

    def _may_fit(self, sizes: Sizes) -> bool:
        """Return whether some recompute makes a rank's layers fit with these parallel ``sizes``.

        The schedule with the least memory counts.
        """
        free = self.left(sizes)
        if free is None:
            return True
        held = min(_least_in_flight(sizes.pipeline), self._job.microbatches(sizes))
        layers, alone = held * self._layers / sizes.pipeline, replace(sizes, pipeline=1)
        return any(
            layers * self.pieces(alone, recompute).activation <= free
            for recompute in self._recompute[::-1]
        )

    def left(self, sizes: Sizes) -> float | None:
        """Return the bytes that the model leaves for activations and temporary tensors on a rank.

        The rank is the fullest with these parallel ``sizes``. None if unknown.
        """
        model = self.model_bytes(sizes)
        allowed_bytes = self._job.memory_of([model])
        return None if allowed_bytes is None else allowed_bytes - model.total

    def temporary(self, sizes: Sizes, recompute: LayerRecompute) -> float:
        """Return the bytes of temporary tensors on the fullest rank with these parallel ``sizes``.

        That rank is the first, which has the output layer only if there are no other pipeline
        ranks.
        """
        job = self._of_types
        stage = Stage(job.model.layers, output_layer=sizes.pipeline == 1)
        return temporary_bytes(job.model_of(sizes), stage, job.execution_of(sizes, recompute))

    def _pieces(self, alone: Sizes, recompute: LayerRecompute) -> _Pieces:
        """Return seconds and bytes of layers, and of the ends of a pipeline, with the parallel
        sizes ``alone``.

        These sizes have no pipeline parallelism.
        """
        job = self._of_types
        model, execution = job.model_of(alone), job.execution_of(alone, recompute)
        stages = (
            Stage(model.layers[:1], embedding=True),
            *(Stage((layer,)) for layer in model.layers),
            Stage(model.layers[-1:], depths=model.mtp_num_layers, output_layer=True),
        )
        costs = estimate(model, stages, execution, job.rates)
        made = np.stack([figures_of_stage(costs, *one) for one in enumerate(stages)])
        made[:, Figure.INPUT] -= made[:, Figure.FUSED_BACKWARD_SAVING]
        layer = self._shares @ made[1:-1]
        first, last = made[0] - made[1], made[-1] - made[-2]
        layer[[Figure.FORWARD, Figure.INPUT]] -= job.rates.launch
        return _Pieces(layer, first, last)

    def _model_bytes(self, sizes: Sizes) -> ModelBytes:
        """Return the bytes of the model on the fullest rank with these parallel ``sizes``.

        Temporary tensors are not included.
        """
        state = self._of_types.state_of(sizes)
        # A launch with one pipeline rank, one context-parallel rank and a micro-batch size of 1 has
        # the same parameters on each tensor-parallel rank.
        like = replace(sizes, pipeline=1, context=1, micro_batch=1)
        layer, first, last = self._parts(like, state)
        ends = first + last if sizes.pipeline == 1 else max(first, last, key=sum)
        context = context_bytes(
            self._of_types.execution_of(sizes, self._recompute[0]),
            pipeline=sizes.pipeline,
            data_parallel=state.data_parallel,
            expert_data_parallel=state.expert_data_parallel,
        )
        on_rank = ceil(self._layers / sizes.pipeline)
        return replace(ModelBytes(*(on_rank * layer + ends).tolist()), context=context)

    def _parts_of_model(self, sizes: Sizes, state: TrainingState) -> tuple[Floats, Floats, Floats]:
        """Return the model's bytes of a mean layer, and what the first and the last stage add.

        Each is an array in the order of `ModelBytes`.
        """
        job = self._of_types
        model, execution = job.model_of(sizes), job.execution_of(sizes, self._recompute[0])

        def of(stage: Stage) -> Floats:
            made = bytes_of_chunk(model, stage, execution, state, tables=1, bucket=0)
            return np.array(astuple(made))

        layer = self._shares @ np.stack([of(Stage((kind,))) for kind in model.layers])
        last = Stage((), depths=model.mtp_num_layers, output_layer=True)
        return layer, of(Stage((), embedding=True)), of(last)


def _least_in_flight(ranks: int) -> int:
    """Return how many microbatches the fullest of ``ranks`` pipeline ranks stores, under the
    schedule with the least memory."""
    return (ranks + 2) // 2 if ranks > 1 else 1


def amount_of(recompute: LayerRecompute) -> tuple[bool, int]:
    """Return a sort key for recompute settings, by how much they recompute."""
    return recompute.granularity == FULL, len(recompute.modules) + recompute.num_layers


class _Sized:
    """Estimates of a training job with fixed parallel sizes and recompute."""

    def __init__(
        self, estimator: Estimator, job: SizedJob, sizes: Sizes, recompute: LayerRecompute
    ) -> None:
        self._job, self._sizes, self._recompute = job, sizes, recompute
        self._pieces = estimator.pieces(replace(sizes, pipeline=1), recompute)
        self._layers = len(job.model.layers)
        self._ranks, self._microbatches = sizes.pipeline, job.microbatches(sizes)
        execution = job.execution_of(sizes, recompute)
        message = message_bytes(job.model, execution)
        near, far = (message / speed for speed in job.rates.to_neighbours)
        share = min(job.stride(sizes) / _NODE, 1.0) if job.gpus > _NODE else 0.0
        self._message = near + share * (far - near)
        # Seconds of F, I and W of all layers of a rank.
        self._passes: list[float] = (self._layers / self._ranks * self._pieces.layer)[
            _SECONDS
        ].tolist()
        forward, *backward = self._passes
        self._outside = seconds_outside_passes(
            estimator.model_bytes(sizes),
            job.state_of(sizes),
            execution,
            job.rates,
            RankPasses(forward, sum(backward)),
        )
        self._free = estimator.left(sizes)
        if self._free is not None:
            self._free -= estimator.temporary(sizes, recompute)

    def estimates(self) -> Iterator[Estimated]:
        ranks, microbatches = self._ranks, self._microbatches
        forward, backward, weight = self._passes
        work = sum(self._passes)
        p2p_seconds = 2 * (ranks - 1) * self._message
        if ranks == 1:
            yield self._made("1f1b", True, 0.0, 1)
            return
        yield self._made("1f1b", True, (ranks - 1) * work + p2p_seconds, ranks)
        bubble = (ranks - 1) * max(forward + backward - weight, 0.0) + p2p_seconds
        yield self._made("zb-1p", False, bubble, ranks)
        most = min(_MOST_CHUNKS, (self._layers + 1) // ranks)
        if microbatches >= ranks:
            for chunks in range(2, most + 1):
                in_flight = ranks + (ranks - 1) / chunks
                bubble = (ranks - 1) * work / chunks + p2p_seconds
                spec = f"interleaved:vpp={chunks}"
                yield self._made(spec, True, bubble, in_flight, chunks=chunks)
                bubble = (ranks - 1) * max(forward + backward - weight, 0.0) / chunks + p2p_seconds
                spec = f"interleaved-zb:vpp={chunks}"
                yield self._made(spec, False, bubble, in_flight, chunks=chunks)
        if most >= 2:
            bubble = (ranks - 1) * forward / 2 + p2p_seconds
            yield self._made("zb-v", False, bubble, ranks, chunks=2, is_v=True)
            bubble += (ranks - 1) * work / 3
            least = _least_in_flight(ranks)
            yield self._made("v-half", False, bubble, least, chunks=2, is_v=True)

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
        """Return the estimate of the schedule ``spec``.

        ``bubble`` is in seconds, ``in_flight`` the microbatches that the fullest rank holds,
        ``chunks`` those of a rank, and ``is_v`` says whether the first and the last stage are on
        one rank.
        """
        pieces, ranks = self._pieces, self._ranks
        layer, first, last = (float(busy(p)) for p in (pieces.layer, pieces.first, pieces.last))
        ends = [first + last, 0.0] if is_v or ranks == 1 else [first, last]
        slowest = least_maximum(self._layers, layer, tuple(ends), ranks)
        if self._job.execution.framework is Framework.PYTORCH:
            slowest += 2 * self._message * (ranks > 1)
        slowest += 2 * self._job.rates.launch * chunks
        seconds = self._microbatches * slowest + bubble + self._outside
        excess = copies = 0.0
        if self._free is not None:
            at_once = min(in_flight, self._microbatches)
            activations = at_once * self._layers / ranks * pieces.activation
            if ranks == 1:
                activations += float((pieces.first + pieces.last)[Figure.ACTIVATION])
            excess = max(activations - self._free, 0.0)
            copies = self._microbatches * excess / at_once / self._job.rates.host
        return Estimated(
            self._sizes, self._recompute, spec, is_stock, seconds, excess, max(seconds, copies)
        )


@cache
def least_maximum(layers: int, layer: float, ends: tuple[float, ...], ranks: int) -> float:
    """Return the least possible time of the slowest of ``ranks`` that share ``layers``.

    A layer takes ``layer`` seconds, and the first ranks take ``ends`` seconds in addition.
    """
    ends = ends[:ranks]
    others = ranks - len(ends)
    candidates = {end + n * layer for end in (*ends, 0.0) for n in range(layers + 1)}
    least = max((layers * layer + sum(ends)) / ranks, max(ends, default=0.0)) * (1 - 1e-9)
    for cap in sorted(c for c in candidates if c >= least):
        allowed_bytes = others * floor(cap / layer + 1e-9)
        allowed_bytes += sum(max(floor((cap - end) / layer + 1e-9), 0) for end in ends)
        if allowed_bytes >= layers:
            return cap
    raise AssertionError(f"{layers} layers cannot be distributed to the ranks")
