"""A small model with its vocabulary divided over the ranks, and the same model in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_ext.runtime.collectives import Collectives
from megatron_ext.runtime.executor import execute
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.transport import Boundary, Channels, Transport
from megatron_ext.runtime.vocabulary import VocabularyPasses
from megatron_ext.runtime.vocabulary_shard import VocabularyShard
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.build import build_program
from megatron_ext.schedule.graph import channels
from megatron_ext.schedule.registry import choose
from megatron_ext.schedule.schedule import VocabularyParallel
from megatron_ext.schedule.verify import Program
from tests.pipeline.stages import CPU, WIDTH, LinearStage, SplitLinear, problem_for

VOCABULARY = 48  # rows of the padded tables
SHAPE = (2, 6)  # b, s


@dataclass(frozen=True)
class Model:
    """What is trained, and how it is divided."""

    dtype: torch.dtype = torch.float32
    is_tied: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False

    def tables(self) -> tuple[Tensor, Tensor]:
        """Embedding and output layer, whole."""
        draw = torch.Generator().manual_seed(100)
        embedding, output = torch.randn(2, VOCABULARY, WIDTH, generator=draw).to(self.dtype)
        return embedding, (embedding if self.is_tied else output)

    def stage(self, number: int, stages: int) -> EndlessStage:
        stage = EndlessStage(number, stages)
        stage.weight.data = stage.weight.data.to(self.dtype)
        stage.bias.data = stage.bias.data.to(self.dtype)
        return stage


def tokens_of(microbatch: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels."""
    draw = torch.Generator().manual_seed(microbatch)
    tokens, labels = torch.randint(VOCABULARY, (2, *SHAPE), generator=draw)
    return tokens, labels


def weights_of(microbatch: int) -> Tensor:
    """What each token counts: some nothing, the others not the same."""
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
    choice = choose(name)
    problem = problem_for(choice.place(ranks), microbatches, forward_only)
    return build_program(choice, replace(problem, vocabulary=vocabulary))


class EndlessStage(LinearStage):
    """A stage that neither makes its own input nor a loss, and takes [s, b, h]."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        self._begin(Kind.FORWARD, microbatch)
        assert x is not None
        y = self.output(x.transpose(0, 1) if self.number == 0 else x)
        self._unsent[microbatch] = y
        if torch.is_grad_enabled():
            self._between[microbatch] = x, y
        return y

    def output(self, x: Tensor) -> Tensor:
        product: Tensor = SplitLinear.apply(torch.tanh(x).flatten(0, 1), self.weight)
        return product.unflatten(0, x.shape[:2]) + self.bias


@dataclass
class Ends:
    """The data, and the loss function."""

    events: list[str]
    faults: Mapping[Action, Callable[[], None]] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)

    def tokens(self, microbatch: int) -> Tensor:
        self.events.append(f"tokens {microbatch}")
        return tokens_of(microbatch)[0]

    def labels(self, microbatch: int) -> Tensor:
        return tokens_of(microbatch)[1]

    def loss(self, microbatch: int, losses: Tensor) -> Tensor | None:
        self.losses[microbatch] = losses
        if not torch.is_grad_enabled():
            return None
        losses = losses.clone().requires_grad_()
        (losses * weights_of(microbatch)).sum().backward()
        return losses.grad


@dataclass
class VocabularyPipeline:
    """This rank's stages and shard, over several steps."""

    program: Program
    group: dist.ProcessGroup
    model: Model

    def __post_init__(self) -> None:
        placement = self.program.schedule.placement
        rank = self.group.rank()
        self.channels = Channels(self.group, channels(self.program.schedule), CPU)
        self.collectives = Collectives(self.group, CPU)
        self.recorder = Recorder(rank)
        self.ends = Ends([])
        self.stages = {
            number: self.model.stage(number, placement.stages)
            for number in placement.stages_of[rank]
        }
        rows = VOCABULARY // placement.ranks
        embedding, output = (
            torch.nn.Parameter(table[rank * rows : (rank + 1) * rows].clone())
            for table in self.model.tables()
        )
        if self.model.is_tied:
            output = embedding
        self.shard = VocabularyShard(embedding, output, rank * rows, None, False)

    def step(self, program: Program | None = None) -> None:
        program = program or self.program
        boundary = Boundary((*reversed(SHAPE), WIDTH), self.model.dtype)
        placement = program.schedule.placement
        transport = Transport(self.channels, boundary, placement, self.recorder)
        vocabulary = VocabularyPasses(
            program, self.ends, self.shard, self.collectives, boundary, SHAPE, self.recorder
        )
        with torch.set_grad_enabled(not program.problem.forward_only):
            execute(program, self.stages, transport, self.recorder, vocabulary)
        assert transport.is_empty()
        assert all(stage.is_empty() for stage in self.stages.values())


@dataclass(frozen=True)
class Reference:
    """A step in one process, all in float64, by torch's own functions."""

    losses: dict[int, Tensor]
    embedding: Tensor  # gradients; of a tied table, both in one
    output: Tensor
    stages: list[Tensor]  # of weight and bias in one


def alone(model: Model, stages: int, microbatches: int) -> Reference:
    embedding, output = (table.double().requires_grad_() for table in model.tables())
    if model.is_tied:
        output = embedding
    layers = []
    for number in range(stages):
        stage = model.stage(number, stages)
        layers.append(
            tuple(each.detach().double().requires_grad_() for each in (stage.weight, stage.bias))
        )
    losses = {}
    for microbatch in range(microbatches):
        tokens, labels = tokens_of(microbatch)
        x = functional.embedding(tokens, embedding)
        for weight, bias in layers:
            x = functional.linear(torch.tanh(x), weight, bias)
        logits = functional.linear(x, output)
        each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        losses[microbatch] = each.view(SHAPE).detach()
        (each.view(SHAPE) * weights_of(microbatch)).sum().backward()
    return Reference(
        losses, _gradient(embedding), _gradient(output), [_in_one(layer) for layer in layers]
    )


def _in_one(parameters: Iterable[Tensor]) -> Tensor:
    return torch.cat([_gradient(each).flatten() for each in parameters])


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
