"""Passes and collectives of vocabulary parallelism in a step, by their actions.

The first stage of the model gets an input, the sum of the shards' embeddings, and returns its
gradient; the last stage returns hidden states and gets their gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, override

import torch
from torch import Tensor

from megatron_ext.compile.program.verify import Program
from megatron_ext.features.vocabulary.runtime.shard import (
    Logits,
    VocabularyShard,
    add_embedding_gradient,
    add_output_gradient,
    combine,
    hidden_states_gradient,
    look_up,
    losses_of,
    make_logits,
    scaled,
)
from megatron_ext.runtime.messages.collectives import Collectives, StepCollectives
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.owner import Handler, Owner
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage_io import PipelineEnds
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import VocabularyParallel


class VocabularyEnds(Protocol):
    """Data that vocabulary passes exchange with the model's first and last stage."""

    def tokens(self, microbatch: int) -> Tensor:
        """Begin the forward step of the first stage, before its pass F, and return the tokens.

        They are int64 [b, s]. The call is on the rank of the first stage.
        """

    def labels(self, microbatch: int) -> Tensor:
        """Return the labels, int64 [b, s], on the last stage's rank, after its F."""

    def loss(self, microbatch: int, losses: Tensor) -> Tensor | None:
        """End the forward step on the last stage's rank, given the tokens' losses.

        Args:
            losses: fp32 [b, s], one for each token.

        Returns:
            The gradient of the scaled loss by each of ``losses``, fp32 [b, s]; None in an
            evaluation.
        """


class VocabularyPasses(Owner, PipelineEnds):
    """Vocabulary passes of one step on this rank, with the tensors needed between them.

    The first and the last stage exchange tensors with these passes, as other stages do with
    messages.
    """

    def __init__(
        self,
        program: Program,
        ends: VocabularyEnds | None,
        shard: VocabularyShard,
        collectives: Collectives,
        boundary: Boundary,
        tokens_shape: tuple[int, int],
        recorder: Recorder,
    ) -> None:
        """Initialise the passes of one step.

        Args:
            program: the program of the step, with vocabulary parallelism.
            ends: the first and last stage; None on a rank that has neither.
            shard: the vocabulary shard of this rank.
            collectives: collectives of the pipeline.
            boundary: hidden states of the last stage: [s, b, h], or with sequence parallelism a
                tensor-parallel rank's part of them.
            tokens_shape: b, s.
            recorder: recorder that is notified of every pass and wait.
        """
        placement = program.schedule.placement
        self._first_rank, self._last_rank = placement.rank_of[0], placement.rank_of[-1]
        self._stage = placement.stages_of[collectives.rank][0]
        self._is_early = program.problem.options.vocab_parallel is VocabularyParallel.TWO
        self._trains = not program.problem.forward_only
        self._vocabulary = shard.rows * placement.ranks * shard.tensor_parallel_size
        self._ends = ends
        self._shard = shard
        self._boundary = boundary
        self._tokens_shape = tokens_shape
        self._recorder = recorder
        self._exchange = StepCollectives(collectives, recorder)
        # Each of these dictionaries has tensors by microbatch. Those up to `_embedding_gradients`
        # have inputs of collectives, the others have inputs of passes.
        self._looked_up: dict[int, Tensor] = {}
        self._hidden_states: dict[int, Tensor] = {}
        self._own_statistics: dict[int, Tensor] = {}
        self._own_gradients: dict[int, Tensor] = {}
        self._loss_gradients: dict[int, Tensor] = {}
        self._embedding_gradients: dict[int, Tensor] = {}
        # Tokens of each microbatch, from the pass E to the pass EW.
        self._tokens: dict[int, Tensor] = {}
        # Logits of each microbatch, from the pass S to the pass SW.
        self._logits: dict[int, Logits] = {}
        self._labels: dict[int, Tensor] = {}  # labels of each microbatch, until the pass L
        # Softmax statistics of all ranks for each microbatch, for the passes L, SI and SW.
        self._statistics: dict[int, Tensor] = {}
        # Factors of the loss's gradient, from the pass L to the last stage's I or B.
        self._scales: dict[int, Tensor] = {}

    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.BCAST_E: self._share_tokens,
            Kind.EMBEDDING: self._look_up,
            Kind.REDUCE_E: self._sum_embeddings,
            Kind.BCAST_S: self._share_hidden_states,
            Kind.LOGITS: self._make_logits,
            Kind.GATHER_S: self._share_statistics,
            Kind.LOSS: self._make_loss,
            Kind.BCAST_SW: self._share_loss_gradient,
            Kind.LOGITS_INPUT: self._make_gradient,
            Kind.REDUCE_SI: self._sum_gradients,
            Kind.LOGITS_WEIGHT: self._add_output_gradient,
            Kind.BCAST_EW: self._share_embedding_gradient,
            Kind.EMBEDDING_WEIGHT: self._add_embedding_gradient,
            Kind.WAIT_S: self._wait_given,
            Kind.WAIT_SI: self._wait_given,
            Kind.WAIT_E: self._wait_given,
        }

    # --- Interface to the stages' passes

    @override
    def first_input(self, microbatch: int) -> Tensor:
        """Return the first stage's input: the sum of all shards' embeddings, [b, s, h].

        With sequence parallelism it is a tensor-parallel rank's part.
        """
        return self._result(Kind.REDUCE_E, microbatch)

    @override
    def take_last_output(self, microbatch: int, y: Tensor) -> bool:
        self._hidden_states[microbatch] = y.detach()
        return True

    @override
    def last_output_gradient(self, microbatch: int) -> Tensor:
        gradient = self._result(Kind.REDUCE_SI, microbatch)
        by_loss = self._scales.pop(microbatch)
        return scaled(self._shard, gradient, by_loss, self._boundary.dtype)

    @override
    def take_first_gradient(self, microbatch: int, dx: Tensor | None) -> None:
        assert dx is not None, "the first stage gave no gradient of the embeddings"
        self._embedding_gradients[microbatch] = dx

    def finish(self) -> None:
        self._exchange.finish()
        kept = [value for value in vars(self).values() if isinstance(value, dict)]
        assert not any(kept)

    def abandon(self) -> None:
        self._exchange.abandon()

    # --- passes of the embedding

    def _share_tokens(self, action: Action) -> None:
        tokens = None
        if self._is_on(self._first_rank):
            assert self._ends is not None
            tokens = self._ends.tokens(action.microbatch)
        self._broadcast(action, [(tokens, self._tokens_shape, torch.int64)], self._first_rank)

    def _look_up(self, action: Action) -> None:
        tokens = self._result(Kind.BCAST_E, action.microbatch)
        with self._recorder.computing(action), torch.no_grad():
            self._looked_up[action.microbatch] = look_up(self._shard, tokens)
        if self._trains:
            self._tokens[action.microbatch] = tokens

    def _sum_embeddings(self, action: Action) -> None:
        part = self._looked_up.pop(action.microbatch)
        self._exchange.sum(action, part, self._first_rank)

    def _share_embedding_gradient(self, action: Action) -> None:
        gradient = self._embedding_gradients.pop(action.microbatch, None)
        table = self._shard.embedding
        shape = (*self._tokens_shape, table.shape[1])
        self._broadcast(action, [(gradient, shape, table.dtype)], self._first_rank)

    def _add_embedding_gradient(self, action: Action) -> None:
        gradient = self._result(Kind.BCAST_EW, action.microbatch)
        tokens = self._tokens.pop(action.microbatch)
        with self._recorder.computing(action), torch.no_grad():
            add_embedding_gradient(self._shard, tokens, gradient)

    # --- passes of the output layer

    def _share_hidden_states(self, action: Action) -> None:
        labels = None
        if self._is_on(self._last_rank):
            assert self._ends is not None
            labels = self._labels[action.microbatch] = self._ends.labels(action.microbatch)
        hidden_states = self._hidden_states.pop(action.microbatch, None)
        assert self._boundary.shape is not None
        self._broadcast(
            action,
            [
                (hidden_states, self._boundary.shape, self._boundary.dtype),
                (labels, self._tokens_shape, torch.int64),
            ],
            self._last_rank,
        )

    def _make_logits(self, action: Action) -> None:
        microbatch = action.microbatch
        hidden_states, labels = self._exchange.result(action._replace(kind=Kind.BCAST_S))
        early = self._is_early and self._trains
        with self._recorder.computing(action), torch.no_grad():
            logits = make_logits(self._shard, hidden_states, labels, early)
        self._own_statistics[microbatch] = logits.statistics
        if self._trains:
            self._logits[microbatch] = logits

    def _share_statistics(self, action: Action) -> None:
        self._exchange.gather(action, self._own_statistics.pop(action.microbatch))

    def _make_loss(self, action: Action) -> None:
        microbatch = action.microbatch
        assert self._ends is not None
        statistics = self._combined(microbatch)
        labels = self._labels.pop(microbatch)
        with self._recorder.computing(action):
            with torch.no_grad():
                losses = losses_of(statistics, labels, self._vocabulary)
            gradient = self._ends.loss(microbatch, losses)
        if self._trains:
            assert gradient is not None, f"{action} gave no gradient of the losses"
            self._scales[microbatch] = self._loss_gradients[microbatch] = gradient.detach()
        else:
            del self._statistics[microbatch]

    def _share_loss_gradient(self, action: Action) -> None:
        gradient = self._loss_gradients.pop(action.microbatch, None)
        self._broadcast(action, [(gradient, self._tokens_shape, torch.float32)], self._last_rank)

    def _make_gradient(self, action: Action) -> None:
        microbatch = action.microbatch
        statistics = self._combined(microbatch)
        with self._recorder.computing(action), torch.no_grad():
            logits = self._logits[microbatch]
            gradient = hidden_states_gradient(self._shard, logits, statistics)
            self._own_gradients[microbatch] = gradient
            self._logits[microbatch] = logits.without_early()

    def _sum_gradients(self, action: Action) -> None:
        part = self._own_gradients.pop(action.microbatch)
        self._exchange.sum(action, part, self._last_rank)

    def _add_output_gradient(self, action: Action) -> None:
        microbatch = action.microbatch
        by_loss = self._result(Kind.BCAST_SW, microbatch)
        statistics = self._statistics.pop(microbatch)
        with self._recorder.computing(action), torch.no_grad():
            add_output_gradient(self._shard, self._logits.pop(microbatch), statistics, by_loss)

    # --- collectives of both layers

    def _wait_given(self, action: Action) -> None:
        (need,) = RULES[action.kind].needs
        self._exchange.result(action._replace(kind=need.kinds[0]))

    def _combined(self, microbatch: int) -> Tensor:
        """Return the softmax statistics of the whole vocabulary, [3, s, b]."""
        if microbatch not in self._statistics:
            self._statistics[microbatch] = combine(self._result(Kind.GATHER_S, microbatch))
        return self._statistics[microbatch]

    def _result(self, kind: Kind, microbatch: int) -> Tensor:
        return self._exchange.result(Action(self._stage, kind, microbatch))[0]

    def _is_on(self, rank: int) -> bool:
        return self._exchange.rank == rank

    def _broadcast(
        self,
        action: Action,
        tensors: list[tuple[Tensor | None, tuple[int, ...], torch.dtype]],
        root: int,
    ) -> None:
        """Start to broadcast the ``tensors`` of ``root``.

        Every rank knows their shapes and types.
        """
        shared = []
        for tensor, shape, dtype in tensors:
            assert (tensor is not None) == self._is_on(root)
            if tensor is None:
                tensor = torch.empty(shape, dtype=dtype, device=self._exchange.device)
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(
                    f"{action} has a tensor of {tensor.dtype} of shape {tuple(tensor.shape)}, but "
                    f"the ranks of this pipeline expect {dtype} of shape {shape}"
                )
            shared.append(tensor.detach().contiguous())
        self._exchange.broadcast(action, shared, root)
