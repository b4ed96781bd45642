"""Rates that a rank achieves on its machine, in floating-point operations and bytes per second.

An operation takes as long as the slower of its arithmetic and its memory traffic, plus what its
kernel costs to launch. Exchanges go within a domain of fast links or beyond it. `Rates` has these
rates for one machine and turns operations into seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.cost_model.measured.machine_factors import MachineFactors
from megatron_ext.cost_model.measured.scale import Links, Measured
from megatron_ext.cost_model.messages.collective_seconds import ring_latency
from megatron_ext.cost_model.operations.matrix_products import TensorCores
from megatron_ext.cost_model.operations.operation import Engine, Exchange, Group, Operation

_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Rates:
    """Rates that a rank reaches on its machine, which are lower than the peak rates of its GPU.

    Attributes:
        linear: floating-point operations per second in products with layers' weights, in the run's
            precision.
        grouped: floating-point operations per second in products with experts' weights.
        matrix: floating-point operations per second in other products, which are in 16 bits.
        attention: floating-point operations per second in attention and in recurrences.
        memory: bytes per second to and from the GPU's memory; inf: this time is not counted.
        network: bytes per second to GPUs beyond the `domain`, over the network.
        peers: bytes per second to GPUs within the `domain`.
        host: bytes per second to the host, and at the same time as many back.
        domain: number of GPUs that NVLink connects, at the rate ``peers``.
        launch: seconds that a pass takes in addition to its operations.
        peer_latency, network_latency: seconds that a message takes in addition to its bytes.
        sms: streaming multiprocessors, which determine the number of waves of a matrix product; 0:
            shapes do not matter, and collectives have no latency.
        operands: bytes per second from the L2 cache.
        kernel: seconds from the end of a kernel to the start of the next.
        attention_backward: floating-point operations per second of attention's backward pass; 0: as
            ``attention``.
        slower_weights: factor by which weight gradients of layers' and experts' matrices take
            longer than other products of their shapes.
        drawn: random numbers per second that a dropout draws; inf: they take no time.
        overlap, overlap_in_one_queue: the largest share of the time of experts' ``alltoall``
            messages that overlapped passes hide, with many hardware queues and with one.
        measured: measurements of a model on this machine, to which estimates are scaled; None if
            there are none.
        factors: ratios of measured to estimated seconds of single operations on this machine, by
            shape; None if none were measured.
    """

    linear: float
    grouped: float
    matrix: float
    attention: float
    memory: float
    network: float
    peers: float
    host: float
    domain: int = _GPUS_PER_NODE
    launch: float = 0.0
    peer_latency: float = 0.0
    network_latency: float = 0.0
    sms: int = 0
    operands: float = math.inf
    kernel: float = 0.0
    attention_backward: float = 0.0
    slower_weights: float = 1.0
    drawn: float = math.inf
    overlap: float = 1.0
    overlap_in_one_queue: float = 1.0
    measured: Measured | None = None
    factors: MachineFactors | None = None

    @property
    def to_neighbours(self) -> tuple[float, float]:
        """Bytes per second between pipeline neighbours, within an NVLink domain and beyond it."""
        links = Links() if self.measured is None else self.measured.links
        return links.within or self.peers, links.between or self.network

    @property
    def latencies(self) -> tuple[float, float]:
        """Seconds of a short message between pipeline neighbours, within an NVLink domain and
        beyond."""
        return self.peer_latency, self.network_latency

    @property
    def ranks_of_node(self) -> int:
        """Number of ranks that are connected at the first (faster) rate of `to_neighbours`."""
        links = Links() if self.measured is None else self.measured.links
        return links.ranks_of_node or self.domain

    @classmethod
    def from_training_speed(
        cls, operations: float, network: float, host: float, peers: float
    ) -> Rates:
        """Return the rates of a machine on which only the speed of whole trainings is known.

        All operations have the same rate, ``operations`` per second, which includes the time of
        norms and of waiting.
        """
        return cls(
            operations,
            operations,
            operations,
            operations,
            math.inf,
            network,
            peers,
            host,
            attention_backward=operations,
        )

    def seconds_of(self, operation: Operation) -> tuple[float, float, float]:
        """Return the seconds of F, I and W of ``operation``; I includes W if they cannot be split.

        A kernel moves its data while it computes, so it takes the longer of the times for computing
        and for moving. The kernels of a layer run one after the other, so their times add up.
        """
        moved = operation.moved
        computed = self._computed(operation)
        factors = self._factors(operation)
        forward, backward, weights = (
            factor * (max(seconds, size / self.memory) + (self.kernel if size else 0.0))
            for factor, seconds, size in zip(
                factors,
                computed,
                (moved.forward, moved.input_gradient, moved.weight_gradient),
                strict=True,
            )
        )
        if operation.is_unsplit:
            return forward, backward + weights, 0.0
        return forward, backward, weights

    def _computed(self, operation: Operation) -> tuple[float, float, float]:
        """Return the seconds of F, I and W in which ``operation`` computes, without memory
        traffic."""
        flops, engine = operation.flops, self._engine(operation.engine)
        product = operation.product
        if operation.drawn:
            return operation.drawn / self.drawn, 0.0, 0.0
        if product is None or not self.sms:
            backward = engine
            if operation.engine is Engine.ATTENTION and self.attention_backward:
                backward = self.attention_backward
            return (
                flops.forward / engine,
                (flops.input_gradient + operation.recomputed_flops) / backward,
                flops.weight_gradient / engine,
            )
        cores = TensorCores(engine, self.operands, self.operands, self.sms)
        outputs = (2.0, 2.0, 4.0)
        forward, backward, weights = (
            cores.seconds(shape, product.groups, operation.operand_bytes, output)
            for shape, output in zip(product.shapes, outputs, strict=True)
        )
        if operation.engine in (Engine.LINEAR, Engine.GROUPED):
            weights *= self.slower_weights
        return forward, backward, weights

    def _factors(self, operation: Operation) -> tuple[float, float, float]:
        """Return the ratios of measured to estimated seconds of F, I and W of ``operation``."""
        product, factors = operation.product, self.factors
        if factors is None:
            return 1.0, 1.0, 1.0
        if operation.is_attention:
            return *factors.of_attention(operation.flops.forward, operation.moved.forward), 1.0
        if product is None or operation.engine not in (Engine.LINEAR, Engine.GROUPED):
            return 1.0, 1.0, 1.0
        if operation.engine is Engine.LINEAR:
            forward, backward, weights = map(factors.of_product, product.shapes)
        else:
            forward, backward, weights = (
                factors.of_grouped((*shape, product.groups)) for shape in product.shapes
            )
        return forward, backward, weights

    def _engine(self, engine: Engine) -> float:
        match engine:
            case Engine.LINEAR:
                return self.linear
            case Engine.MATRIX:
                return self.matrix
            case Engine.GROUPED:
                return self.grouped
            case Engine.ATTENTION:
                return self.attention
        return math.inf

    def seconds_to_exchange(self, exchange: Exchange) -> tuple[float, float]:
        """Return the seconds that F and I wait for an ``exchange`` with other ranks.

        Bytes within an NVLink domain and bytes to other domains move at the same time.
        """
        ranks, choices = exchange.ranks, exchange.choices
        near = max(min(ranks, self.domain // exchange.stride), 1)
        nodes = ranks / near
        of_ranks = _distinct(ranks, choices) if choices else 1
        of_nodes = _distinct(nodes, choices) if choices else 1
        most, groups = exchange.groups
        # The experts of a token lie in at most ``most`` groups of experts. Each group is spread
        # over nodes / groups nodes.
        if choices and most and groups:
            of_nodes = min(of_nodes, most * max(nodes / groups, 1))
        within = (near - 1) / (near if choices else ranks)
        to_peers = of_ranks * within / self.peers
        to_others = of_nodes * (nodes - 1) / nodes / self.network
        seconds_per_byte = max(to_peers, to_others)
        latency = 0.0
        if self.sms:
            latency = ring_latency(exchange.ring_passes, exchange.collectives, near, nodes)
        forward, backward = (
            (moved * seconds_per_byte + (latency if moved else 0.0))
            * self._factor_of(exchange, moved)
            for moved in (exchange.moved.forward, exchange.moved.input_gradient)
        )
        return forward, backward

    def _factor_of(self, exchange: Exchange, moved: float) -> float:
        """Return the ratio of measured to estimated seconds of an ``exchange`` of ``moved``
        bytes."""
        if self.factors is None:
            return 1.0
        if exchange.group is Group.TENSOR:
            return self.factors.of_gather(moved / exchange.ring_passes)
        if exchange.group is Group.EXPERT and not exchange.choices:
            # The bytes count both directions of the exchange.
            return self.factors.of_exchange(moved / 2)
        return 1.0


def _distinct(places: float, choices: int) -> float:
    """Return the expected number of distinct places among ``choices`` random ones of ``places``."""
    return places * (1 - (1 - 1 / places) ** choices)


# Rates of one CPU core, with messages by gloo over the loopback interface.
CPU = Rates.from_training_speed(operations=20e9, network=1e9, host=5e9, peers=1e9)
