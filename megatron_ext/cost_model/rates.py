"""Rates that a rank reaches on its machine, in operations and in bytes per second."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ext.cost_model.measured.machine_factors import MachineFactors
from megatron_ext.cost_model.measured.scale import Links, Measured
from megatron_ext.cost_model.messages.collectives import ring_latency
from megatron_ext.cost_model.operations.matrix_products import TensorCores
from megatron_ext.cost_model.operations.operation import Engine, Exchange, Group, Operation

_NODE = 8  # GPUs


@dataclass(frozen=True)
class Rates:
    """Rates that a rank achieves, as opposed to peak rates.

    Attributes:
        linear: floating-point operations per second of layers' matrices, in the run's precision.
        grouped: the same for experts' matrices.
        matrix: the same for other matrices, which are in 16 bits.
        attention: the same for attention, and for recurrences.
        memory: bytes per second to and from the GPU's memory; inf: not counted.
        network: bytes of messages per second between nodes.
        peers: bytes per second to GPUs within a `domain`.
        host: bytes per second to the host or back, each direction at once.
        domain: number of GPUs that are connected at ``peers``.
        launch: seconds that a pass takes in addition to its operations.
        latency_of_peers, latency_of_network: seconds of a short message. A long one takes them in
            addition.
        sms: streaming multiprocessors, which determine the waves of a product of some shape; 0:
            shapes do not count, and collectives have no latency.
        operands: bytes per second from the second-level cache.
        kernel: seconds between two kernels.
        attention_backward: rate of attention's backward pass; 0: as ``attention``.
        measured: measurements of a model on this machine, to which estimates are scaled; None:
            there are none.
        factors: measured over estimated seconds of single operations on this machine, by their
            shapes; None: none were measured.
    """

    linear: float
    grouped: float
    matrix: float
    attention: float
    memory: float
    network: float
    peers: float
    host: float
    domain: int = _NODE
    launch: float = 0.0
    latency_of_peers: float = 0.0
    latency_of_network: float = 0.0
    sms: int = 0
    operands: float = math.inf
    kernel: float = 0.0
    attention_backward: float = 0.0
    measured: Measured | None = None
    factors: MachineFactors | None = None

    @property
    def to_neighbours(self) -> tuple[float, float]:
        """Bytes per second from one pipeline rank to the next: within a domain, and beyond it."""
        links = Links() if self.measured is None else self.measured.links
        return links.within or self.peers, links.between or self.network

    @property
    def latencies(self) -> tuple[float, float]:
        """Seconds of a short message from one pipeline rank to the next: within a domain, and
        beyond it."""
        return self.latency_of_peers, self.latency_of_network

    @property
    def ranks_of_node(self) -> int:
        """Number of ranks that are connected at the first rate of `to_neighbours`."""
        links = Links() if self.measured is None else self.measured.links
        return links.ranks_of_node or self.domain

    @classmethod
    def as_a_whole(cls, operations: float, network: float, host: float, peers: float) -> Rates:
        """Return the rates of a machine on which only the speed of whole trainings is known.

        Single operations have no rates then. ``operations`` per second include attention, norms and
        waiting.
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
        """Return the seconds of F, I and W of ``operation``. W is part of I if the operation's
        backward pass is unsplit.

        A kernel loads its data while it computes, so each kernel takes the longer of the two times.
        The kernels of a layer run one after the other, so their times add up.
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
        if operation.is_whole:
            return forward, backward + weights, 0.0
        return forward, backward, weights

    def _computed(self, operation: Operation) -> tuple[float, float, float]:
        """Return the seconds of the floating-point operations of F, I and W."""
        flops, engine = operation.flops, self._engine(operation.engine)
        product = operation.product
        if product is None or not self.sms:
            backward = engine
            if operation.engine is Engine.ATTENTION and self.attention_backward:
                backward = self.attention_backward
            return (
                flops.forward / engine,
                (flops.input_gradient + operation.again) / backward,
                flops.weight_gradient / engine,
            )
        cores = TensorCores(engine, self.operands, self.operands, self.sms)
        outputs = (2.0, 2.0, 4.0)
        forward, backward, weights = (
            cores.seconds(shape, product.groups, operation.operand_bytes, output)
            for shape, output in zip(product.shapes, outputs, strict=True)
        )
        return forward, backward, weights

    def _factors(self, operation: Operation) -> tuple[float, float, float]:
        """Measured over estimated seconds of F, I and W of ``operation``."""
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
        """Return the seconds that F and I wait for ``exchange``. Bytes to peers and bytes to other
        nodes move at the same time."""
        ranks, choices = exchange.ranks, exchange.choices
        near = max(min(ranks, self.domain // exchange.stride), 1)
        nodes = ranks / near
        of_ranks = _distinct(ranks, choices) if choices else 1
        of_nodes = _distinct(nodes, choices) if choices else 1
        within = (near - 1) / (near if choices else ranks)
        to_peers = of_ranks * within / self.peers
        to_others = of_nodes * (nodes - 1) / nodes / self.network
        a_byte = max(to_peers, to_others)
        latency = 0.0
        if self.sms:
            latency = ring_latency(exchange.halves, exchange.collectives, near, nodes)
        forward, backward = (
            (moved * a_byte + (latency if moved else 0.0)) * self._factor_of(exchange, moved)
            for moved in (exchange.moved.forward, exchange.moved.input_gradient)
        )
        return forward, backward

    def _factor_of(self, exchange: Exchange, moved: float) -> float:
        """Return measured over estimated seconds of ``exchange``, which moves ``moved`` bytes."""
        if self.factors is None:
            return 1.0
        if exchange.group is Group.TENSOR:
            return self.factors.of_gather(moved / exchange.halves)
        if exchange.group is Group.EXPERT and not exchange.choices:
            return self.factors.of_exchange(moved / 2)  # there and back
        return 1.0


def _distinct(places: float, choices: int) -> float:
    """Return the expected number of distinct places, out of ``places``, among ``choices`` random
    ones."""
    return places * (1 - (1 - 1 / places) ** choices)


# A CPU: one core, gloo over loopback, its memory.
CPU = Rates.as_a_whole(operations=20e9, network=1e9, host=5e9, peers=1e9)
