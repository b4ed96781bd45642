"""A small model with its vocabulary split over the ranks, and the same model in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.graph import channels
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.features.vocabulary.runtime.shard import VocabularyShard
from megatron_ext.features.vocabulary.runtime.vocabulary_passes import VocabularyPasses
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.collectives import Collectives
from megatron_ext.runtime.messages.transport import Boundary, Transport
from megatron_ext.runtime.owner import Handler
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.problem import VocabularyParallel
from tests.helpers.stages import CPU, WIDTH, LinearStage, SplitLinear, problem_for

VOCABULARY = 48  # number of rows of the padded tables
SHAPE = (2, 6)  # shape of the tokens: samples, tokens of a sample


@dataclass(frozen=True)
class Model:
    """A model to be trained, and whether its sequences are split by sequence parallelism."""

    dtype: torch.dtype = torch.float32
    is_tied: bool = False
    sequence_parallel: bool = False

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return the tables of the embedding and of the output layer, whole."""
        draw = torch.Generator().manual_seed(100)
        embedding, output = torch.randn(2, VOCABULARY, WIDTH, generator=draw).to(self.dtype)
        return embedding, (embedding if self.is_tied else output)

    def stage(self, number: int, stages: int) -> EndlessStage:
        stage = EndlessStage(number, stages)
        stage.weight.data = stage.weight.data.to(self.dtype)
        stage.bias.data = stage.bias.data.to(self.dtype)
        return stage


def tokens_of(microbatch: int) -> tuple[Tensor, Tensor]:
    """Return the tokens and the labels of ``microbatch``."""
    draw = torch.Generator().manual_seed(microbatch)
    tokens, labels = torch.randint(VOCABULARY, (2, *SHAPE), generator=draw)
    return tokens, labels


def weights_of(microbatch: int) -> Tensor:
    """Return the weight of each token in the loss. Some weights are 0, and the others differ from
    token to token."""
    draw = torch.Generator().manual_seed(1000 + microbatch)
    weights = torch.rand(SHAPE, generator=draw)
    return torch.where(weights < 0.3, 0.0, weights) / weights.numel()


def program_for(
    name: str,
    ranks: int,
    microbatches: int,
    vocabulary: VocabularyParallel,
    forward_only: bool = False,
) -> Program:
    resolved = choose(name)
    problem = problem_for(resolved.place(ranks), microbatches, forward_only)
    return build_program(resolved, problem.with_options(vocab_parallel=vocabulary))


class JoinShards(torch.autograd.Function):
    """The last operation of Megatron's embedding. Tensor-parallel ranks each have a part of a sum,
    [b, s, h]. The result is the sum, [s, b, h], or with sequence parallelism the rank's part of the
    sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, connections: Connections, divides: bool) -> Tensor:
        ctx.connections, ctx.divides = connections, divides
        return connections.whole(x.transpose(0, 1), divides)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        if ctx.divides:
            dy = ctx.connections.joined(dy)
        return dy.transpose(0, 1), None, None


class EndlessStage(LinearStage):
    """A stage that neither creates its own input nor computes a loss, and takes [s, b, h]."""

    connections: Connections | None = None
    divides: bool = False  # whether tensor-parallel ranks split the sequence

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        self._begin(Kind.FORWARD, microbatch)
        assert x is not None and self.connections is not None
        y = self.output(
            JoinShards.apply(x, self.connections, self.divides) if self.number == 0 else x
        )
        self._unsent[microbatch] = y
        if torch.is_grad_enabled():
            self._between[microbatch] = x, y
        return y

    def output(self, x: Tensor) -> Tensor:
        product: Tensor = SplitLinear.apply(torch.tanh(x).flatten(0, 1), self.weight)
        return product.unflatten(0, x.shape[:2]) + self.bias


@dataclass
class Ends:
    """The data at both ends of the pipeline: tokens and labels, and the loss function."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    shape: tuple[int, int] = SHAPE

    def tokens(self, microbatch: int) -> Tensor:
        batch, sequence = self.shape
        return tokens_of(microbatch)[0][:batch, :sequence]

    def labels(self, microbatch: int) -> Tensor:
        return tokens_of(microbatch)[1]

    def loss(self, microbatch: int, losses: Tensor) -> Tensor | None:
        self.losses[microbatch] = losses
        if not torch.is_grad_enabled():
            return None
        losses = losses.clone().requires_grad_()
        (losses * weights_of(microbatch)).sum().backward()
        return losses.grad


@dataclass(frozen=True)
class Rows:
    """A module that only has a weight: some rows of a table."""

    weight: Tensor


@dataclass(frozen=True)
class Connections:
    """This rank's groups. Neighbouring ranks are tensor parallel."""

    pipeline: dist.ProcessGroup
    tensor_parallel: dist.ProcessGroup | None
    channels: Channels
    collectives: Collectives

    def whole(self, partial: Tensor, divides: bool) -> Tensor:
        """Return the sum over tensor-parallel ranks or, if ``divides``, this rank's part of its
        sequence."""
        total = partial.clone(memory_format=torch.contiguous_format)
        if self.tensor_parallel is not None:
            dist.all_reduce(total, group=self.tensor_parallel)
            if divides:
                total = total.chunk(self.tensor_parallel.size())[self.tensor_parallel.rank()]
        return total

    def joined(self, part: Tensor) -> Tensor:
        """Return the whole sequence, joined from the parts of the tensor-parallel ranks."""
        if self.tensor_parallel is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.tensor_parallel.size())]
        dist.all_gather(parts, part, group=self.tensor_parallel)
        return torch.cat(parts)


def connect(program: Program, tensor_parallel: int = 1) -> Connections:
    """Return the groups and channels for ``program``. They also serve other programs with the same
    placement."""
    rank, world = dist.get_rank(), range(dist.get_world_size())
    mine: list[dist.ProcessGroup] = []
    pipelines = [[*world[t::tensor_parallel]] for t in range(tensor_parallel)]
    stages = [[*world[at : at + tensor_parallel]] for at in world[::tensor_parallel]]
    for ranks in pipelines + stages:
        group = dist.new_group(ranks)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine.append(group)
    pipeline, tensor_parallel_group = mine
    return Connections(
        pipeline,
        tensor_parallel_group if tensor_parallel > 1 else None,
        Channels(pipeline, channels(program.schedule), CPU),
        Collectives(pipeline, CPU),
    )


def nothing(action: Action) -> None:
    pass


class WatchedPasses(VocabularyPasses):
    """Passes of the vocabulary that call functions before and after each action."""

    before: Callable[[Action], None]
    after: Callable[[Action], None]

    def handlers(self) -> Mapping[Kind, Handler]:
        def watched(handle: Handler, action: Action) -> None:
            self.before(action)
            handle(action)
            self.after(action)

        return {kind: partial(watched, handle) for kind, handle in super().handlers().items()}


@dataclass
class VocabularyPipeline:
    """This rank's stages and shard, over several steps.

    Attributes:
        before, after: called with each action of the vocabulary.
    """

    program: Program
    connections: Connections
    model: Model
    before: Callable[[Action], None] = nothing
    after: Callable[[Action], None] = nothing

    def __post_init__(self) -> None:
        placement = self.program.schedule.placement
        tensor_parallel = self.connections.tensor_parallel
        self.rank = self.connections.pipeline.rank()
        self.recorder = Recorder(self.rank)
        self.ends = Ends()
        self.stages: dict[int, EndlessStage] = {}
        for number in placement.stages_of[self.rank]:
            stage = self.stages[number] = self.model.stage(number, placement.stages)
            stage.connections, stage.divides = self.connections, self.model.sequence_parallel
        parts = 1 if tensor_parallel is None else tensor_parallel.size()
        part = 0 if tensor_parallel is None else tensor_parallel.rank()
        rows = VOCABULARY // (placement.ranks * parts)
        first = (self.rank * parts + part) * rows
        embedding, output = (
            Rows(torch.nn.Parameter(table[first : first + rows].clone()))
            for table in self.model.tables()
        )
        if self.model.is_tied:
            output = embedding
        self.shard = VocabularyShard(
            embedding, output, first, tensor_parallel, self.model.sequence_parallel
        )
        batch, sequence = SHAPE
        if self.model.sequence_parallel:
            sequence //= parts
        self.boundary = Boundary((sequence, batch, WIDTH), self.model.dtype)

    def step(self, program: Program | None = None) -> None:
        """Run one step, of another program if one is given."""
        program = program or self.program
        placement = program.schedule.placement
        transport = Transport(self.connections.channels, self.boundary, placement, self.recorder)
        vocabulary = WatchedPasses(
            program,
            self.ends,
            self.shard,
            self.connections.collectives,
            self.boundary,
            SHAPE,
            self.recorder,
        )
        vocabulary.before, vocabulary.after = self.before, self.after
        with torch.set_grad_enabled(not program.problem.forward_only):
            execute(program, self.stages, transport, self.recorder, [vocabulary], vocabulary)
        assert transport.is_empty()
        assert len(queue) == 0
        assert all(stage.is_empty() for stage in self.stages.values())


@dataclass(frozen=True)
class Reference:
    """A step in one process, all in float64, with torch's own functions."""

    losses: dict[int, Tensor]
    embedding: Tensor  # gradient of the embedding, or of a tied table
    output: Tensor
    stages: list[Tensor]  # gradients of each stage's weight and bias, in one tensor


@functools.cache
def alone(model: Model, stages: int, microbatches: int) -> Reference:
    """Return the same step in one process, computed once for all programs that a rank compares with
    it."""
    embedding, output = (table.double().requires_grad_() for table in model.tables())
    if model.is_tied:
        output = embedding
    layers = []
    for number in range(stages):
        stage = model.stage(number, stages)
        layers.append(
            tuple(
                parameter.detach().double().requires_grad_()
                for parameter in (stage.weight, stage.bias)
            )
        )
    losses = {}
    for microbatch in range(microbatches):
        tokens, labels = tokens_of(microbatch)
        x = functional.embedding(tokens, embedding)
        for weight, bias in layers:
            x = functional.linear(torch.tanh(x), weight, bias)
        logits = functional.linear(x, output)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses[microbatch] = loss.view(SHAPE).detach()
        (loss.view(SHAPE) * weights_of(microbatch)).sum().backward()
    return Reference(
        losses, _gradient(embedding), _gradient(output), [_in_one(layer) for layer in layers]
    )


def _in_one(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([_gradient(parameter).flatten() for parameter in parameters])


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
