"""Mathematics of a rank's shard of the vocabulary.

Embedding and output layer are sharded by rows over all ranks (Yeung et al. 2024, "Balancing
Pipeline Parallelism with Vocabulary Parallelism", section 4). With P the softmax over the whole
vocabulary and G the one-hot labels, the gradient of the losses by the hidden states is (P - G) W,
by the output layer (P - G)^T X. P needs the largest logit of a token and the sum of all
exponentials: each shard computes its own, and the ranks combine them (`combine`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.runtime.parameter_hooks import hand_over, has_callers_hooks
from megatron_ext.runtime.weight_gradients import accumulate


class Table(Protocol):
    """Module with rows of an embedding or output layer, [rows, h].

    The rows may be computed from other parameters each time they are read.
    """

    @property
    def weight(self) -> Tensor: ...


@dataclass(frozen=True)
class VocabularyShard:
    """Shard (some rows) of the embedding and the output layer on a rank.

    Attributes:
        embedding_table: rows of the embedding.
        output_table: rows of the output layer; the same object if the two are tied.
        first_row: row of the padded vocabulary at which the shard begins; it has ``rows`` rows.
        tensor_parallel: group of the tensor-parallel ranks; None without tensor parallelism.
        sequence_parallel: whether hidden states are split along the sequence over
            ``tensor_parallel``.
    """

    embedding_table: Table
    output_table: Table
    first_row: int
    tensor_parallel: dist.ProcessGroup | None
    sequence_parallel: bool

    @property
    def embedding(self) -> Tensor:
        return self.embedding_table.weight

    @property
    def output(self) -> Tensor:
        return self.output_table.weight

    @property
    def rows(self) -> int:
        return self.output.shape[0]

    @property
    def tensor_parallel_size(self) -> int:
        return 1 if self.tensor_parallel is None else self.tensor_parallel.size()

    def rows_of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each token whether its row is in this shard, and its row in the shard or 0."""
        rows = tokens - self.first_row
        is_here = (rows >= 0) & (rows < self.rows)
        return is_here, rows.masked_fill(~is_here, 0)


def look_up(shard: VocabularyShard, tokens: Tensor) -> Tensor:
    """E: return the embeddings [b, s, h] of ``tokens``; zero for rows that are in another shard."""
    is_here, rows = shard.rows_of(tokens)
    return shard.embedding[rows].masked_fill_(~is_here.unsqueeze(-1), 0.0)


def add_embedding_gradient(shard: VocabularyShard, tokens: Tensor, gradient: Tensor) -> None:
    """EW: add ``gradient``, [b, s, h], of embeddings to that of the table rows of ``tokens``."""
    is_here, rows = shard.rows_of(tokens)
    gradient = gradient.float().masked_fill(~is_here.unsqueeze(-1), 0.0)
    summed = torch.ops.aten.embedding_dense_backward(gradient, rows, shard.rows, -1, False)
    _accumulate(shard.embedding_table, summed)


@dataclass(frozen=True)
class Logits:
    """Logits and other tensors of a microbatch, stored from pass S to pass SW.

    Attributes:
        hidden_states: output of the last stage.
        labels: [s, b].
        logits: [s, b, rows], in the weights' type.
        statistics: softmax statistics of this shard, [3, s, b]: largest logit, sum of exp(logit -
            largest), logit of the label (0 if its row is in another shard).
        early: the product P' W without the labels' rows, with P' the softmax over this shard's
            rows; only in the paper's variant 2, and dropped after pass SI, the gradient by the
            hidden states.
    """

    hidden_states: Tensor
    labels: Tensor
    logits: Tensor
    statistics: Tensor
    early: Tensor | None

    def without_early(self) -> Logits:
        return replace(self, early=None)


def make_logits(
    shard: VocabularyShard, hidden_states: Tensor, labels: Tensor, early: bool
) -> Logits:
    """S: return the logits of ``hidden_states`` by this shard's rows, and their softmax statistics.

    ``hidden_states`` are [s, b, h], or a tensor-parallel rank's part of the sequence; ``labels``
    are [b, s]. ``early`` adds the product P' W that variant 2 computes here.
    """
    labels = labels.t()
    is_here, rows = shard.rows_of(labels)
    rows = rows.unsqueeze(-1)
    logits = _whole_sequence(shard, hidden_states) @ shard.output.t()
    largest = logits.amax(-1).float()
    if shard.tensor_parallel is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=shard.tensor_parallel)
    # The logits less their maximum, and so the exponentials, are in fp32 whatever the type of the
    # logits.
    exponentials = (logits - largest.unsqueeze(-1)).exp_()
    of_label = logits.gather(-1, rows).squeeze(-1).float().masked_fill_(~is_here, 0.0)
    sums = torch.stack([exponentials.sum(-1), of_label])
    if shard.tensor_parallel is not None:
        dist.all_reduce(sums, group=shard.tensor_parallel)
    product = None
    if early:
        softmax = exponentials.div_(sums[0].unsqueeze(-1))
        others = softmax.gather(-1, rows).masked_fill_(is_here.unsqueeze(-1), 0.0)
        softmax.scatter_(-1, rows, others)
        product = softmax.to(shard.output.dtype) @ shard.output
    statistics = torch.cat([largest.unsqueeze(0), sums])
    return Logits(hidden_states, labels, logits, statistics, product)


def combine(statistics: Tensor) -> Tensor:
    """Return softmax statistics [3, s, b] of the vocabulary from the shards' [ranks, 3, s, b]."""
    largest, sums, of_labels = statistics.unbind(1)
    total = largest.amax(0)
    return torch.stack([total, (sums * (largest - total).exp_()).sum(0), of_labels.sum(0)])


def losses_of(statistics: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    """L: return the tokens' cross entropy, contiguous fp32 [b, s], from ``statistics``.

    The statistics are combined over all shards. A label [b, s] outside the ``vocabulary`` counts as
    the likeliest token, as in Megatron.
    """
    # The losses are contiguous, as Megatron's are, since loss functions of callers flatten them by
    # view().
    largest, total, of_label = statistics.transpose(1, 2).contiguous()
    is_none = (labels < 0) | (labels >= vocabulary)
    return total.log() - (of_label - largest).masked_fill_(is_none, 0.0)


def hidden_states_gradient(shard: VocabularyShard, kept: Logits, statistics: Tensor) -> Tensor:
    """SI: return this shard's part of the gradient of each token's loss by its hidden states.

    It is in fp32 and in the layout of the hidden states.
    """
    if kept.early is None:
        gradient = _less_labels(shard, kept, statistics).to(shard.output.dtype) @ shard.output
        return _own_sequence(shard, gradient.float())
    largest, total, of_label = statistics
    is_here, rows = shard.rows_of(kept.labels)
    share = kept.statistics[1] * (kept.statistics[0] - largest).exp_() / total
    # The gradient's term for the label's row is added separately, since the difference of two large
    # products (over all rows, and over the label's) would be inexact.
    label = ((of_label - largest).exp_().div_(total) - 1.0).masked_fill_(~is_here, 0.0)
    gradient = kept.early.float() * share.unsqueeze(-1)
    gradient.addcmul_(label.unsqueeze(-1), shard.output[rows].float())
    return _own_sequence(shard, gradient)


def scaled(shard: VocabularyShard, gradient: Tensor, by_loss: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``gradient``, summed over shards, times the gradient ``by_loss`` [b, s] of losses."""
    by_loss = by_loss.t()
    if shard.sequence_parallel and shard.tensor_parallel is not None:
        by_loss = by_loss.chunk(shard.tensor_parallel_size)[shard.tensor_parallel.rank()]
    return (gradient * by_loss.unsqueeze(-1)).to(dtype)


def add_output_gradient(
    shard: VocabularyShard, kept: Logits, statistics: Tensor, by_loss: Tensor
) -> None:
    """SW: add the gradient of the output layer's rows in this shard.

    ``by_loss`` [b, s] is the gradient of each token's loss.
    """
    gradient = _less_labels(shard, kept, statistics).mul_(by_loss.t().unsqueeze(-1))
    rows = gradient.to(shard.output.dtype).flatten(0, 1)
    del gradient
    _accumulate(
        shard.output_table, rows.t() @ _whole_sequence(shard, kept.hidden_states).flatten(0, 1)
    )


def _less_labels(shard: VocabularyShard, kept: Logits, statistics: Tensor) -> Tensor:
    """Return P - G, the softmax minus the one-hot labels, for this shard's rows, in fp32."""
    largest, total, _ = statistics.unsqueeze(-1)
    is_here, rows = shard.rows_of(kept.labels.unsqueeze(-1))
    softmax = (kept.logits - largest).exp_().div_(total)
    return softmax.scatter_(-1, rows, softmax.gather(-1, rows) - is_here.float())


def _whole_sequence(shard: VocabularyShard, hidden_states: Tensor) -> Tensor:
    if shard.tensor_parallel is None or not shard.sequence_parallel:
        return hidden_states
    length, *rest = hidden_states.shape
    full = hidden_states.new_empty(length * shard.tensor_parallel_size, *rest)
    dist.all_gather_into_tensor(full, hidden_states, group=shard.tensor_parallel)
    return full


def _own_sequence(shard: VocabularyShard, gradient: Tensor) -> Tensor:
    """Return ``gradient`` summed over tensor-parallel ranks.

    With sequence parallelism only this rank's part of the sequence is returned.
    """
    if shard.tensor_parallel is None:
        return gradient
    if not shard.sequence_parallel:
        dist.all_reduce(gradient, group=shard.tensor_parallel)
        return gradient
    length, *rest = gradient.shape
    local = gradient.new_empty(length // shard.tensor_parallel_size, *rest)
    dist.reduce_scatter_tensor(local, gradient, group=shard.tensor_parallel)
    return local


def _accumulate(table: Table, gradient: Tensor) -> None:
    """Add ``gradient`` to that of the table's rows.

    Without a data-parallel wrapper the gradient has the rows' type. Autograd adds it if hooks of
    the caller's are to run, or if the rows are computed from other parameters.
    """
    with torch.enable_grad():
        rows = table.weight
    if not rows.is_leaf or has_callers_hooks(rows):
        hand_over({rows: gradient.to(rows.dtype)})
    else:
        wraps = getattr(rows, "main_grad", None) is not None
        accumulate(rows, gradient if wraps else gradient.to(rows.dtype))
