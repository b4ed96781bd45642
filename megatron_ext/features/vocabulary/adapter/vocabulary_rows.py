"""Rows of embedding and output layer on a pipeline rank, as modules of its first model chunk.

They are Megatron's own layers over a larger group, all pipeline x tensor parallel ranks, which
determines rows, initialisation, parameter attributes and checkpoint keys. Their lookup and
product are not used: the passes of the schedule read their weights.

Rank t of tensor parallelism and p of the pipeline has part ``t * pipeline + p``, so the parts
of a tensor parallel rank together are those of Megatron's own layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn.utils.parametrize import type_before_parametrizations

from megatron_ext.features.vocabulary.runtime.shard import VocabularyShard


@dataclass(frozen=True)
class VocabularyPart:
    """Part of the vocabulary on a rank, which Megatron's layers get in place of a process group.

    The layers call only ``rank()`` and ``size()`` of a group.
    """

    index: int
    parts: int

    def rank(self) -> int:
        return self.index

    def size(self) -> int:
        return self.parts


def vocabulary_part(
    pipeline: dist.ProcessGroup, tensor_parallel: dist.ProcessGroup
) -> VocabularyPart:
    """Return the number of this rank's part of the vocabulary, and the number of parts."""
    ranks = pipeline.size()
    return VocabularyPart(
        tensor_parallel.rank() * ranks + pipeline.rank(), ranks * tensor_parallel.size()
    )


def check_divisible(vocabulary: int, parts: int) -> None:
    """Raise ValueError unless the padded ``vocabulary`` splits evenly over ``parts``."""
    if vocabulary % parts:
        raise ValueError(
            f"a vocabulary of {vocabulary} cannot be split evenly over {parts} ranks (pipeline x "
            f"tensor parallel): pad it to {-(-vocabulary // parts) * parts}, or drop "
            f"--pipeline-vocab-parallel"
        )


class EmbeddingPart(VocabParallelEmbedding):
    """Rows of the embedding on this rank. The first stage's forward pass completes the lookup."""

    def __init__(self, model: Any, part: VocabularyPart, *, reduce_scatter: bool = False) -> None:
        config = model.config
        super().__init__(
            model.vocab_size,
            config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=reduce_scatter,
            config=config,
            tp_group=part,
        )
        self._tensor_parallel = model.pg_collection.tp
        self.embeddings: Tensor | None = None
        self.weight.is_embedding_or_output_parameter = True

    @property
    def output_rows(self) -> int:
        """Number of rows of the output layer here, if that layer has no module of its own."""
        rows: int = self.num_embeddings_per_partition
        return rows

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of ``tokens``, which the ranks have already looked up together.

        The attribute ``embeddings``, [b, s, h], is the sum over the pipeline; the sum over
        tensor-parallel ranks is computed here, as in Megatron.
        """
        embeddings = self.embeddings
        assert embeddings is not None, "no embeddings were handed to the first stage"
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(
                embeddings.transpose(0, 1).contiguous(), group=self._tensor_parallel
            )
        if self._tensor_parallel.size() > 1:
            return reduce_from_tensor_model_parallel_region(embeddings, group=self._tensor_parallel)
        return embeddings


class OutputPart(ColumnParallelLinear):
    """Rows of the output layer on this rank."""

    def __init__(self, model: Any, part: VocabularyPart) -> None:
        config = model.config
        super().__init__(
            config.hidden_size,
            model.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            tp_group=part,
        )
        self.weight.is_embedding_or_output_parameter = True

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        sharded = super().sharded_state_dict(prefix, *args, **kwargs)
        # The number of padded rows depends on the number of ranks, so a checkpoint may have
        # another.
        sharded[f"{prefix}weight"].allow_shape_mismatch = True
        return sharded


def embedding_part(chunk: torch.nn.Module) -> EmbeddingPart | None:
    """Return the module with this rank's rows of the embedding in a model chunk.

    Return None without one.
    """
    return next((part for part in chunk.modules() if isinstance(part, EmbeddingPart)), None)


def output_part(chunk: torch.nn.Module) -> OutputPart | None:
    """Return the module with this rank's rows of the output layer in a model chunk.

    None if they are the embedding's rows.
    """
    return next((part for part in chunk.modules() if isinstance(part, OutputPart)), None)


def _parts(models: Sequence[torch.nn.Module]) -> tuple[EmbeddingPart | OutputPart, ...]:
    """Return this rank's parts of embedding and output layer, which are one if they are tied.

    Raises:
        ValueError: the model was not built with parts, or they are frozen, or the caller has
            changed the output layer or its logits.
    """
    embedding = embedding_part(models[0])
    if embedding is None:
        raise ValueError(
            "--pipeline-vocab-parallel partitions the embedding and the output layer while a "
            "GPTModel is built, and this model was built with whole ones: install the schedule "
            "before the model is built; if the model is no GPTModel, drop "
            "--pipeline-vocab-parallel"
        )
    parts = embedding, output_part(models[0]) or embedding
    _refuse_changed(models[0])
    for part in parts:
        if not part.weight.requires_grad:
            raise ValueError(
                "--pipeline-vocab-parallel does not go with a frozen embedding or output layer: "
                "drop the flag"
            )
    return parts


def _refuse_changed(chunk: torch.nn.Module) -> None:
    """Raise ValueError if the caller has changed the output layer after it was built.

    Passes of the schedule compute the logits without calling the layer.
    """
    for name, part in chunk.named_modules():
        if isinstance(part, OutputPart) and _is_changed(name, part):
            _refuse_with("an output layer with code added")
    if capped := getattr(get_model_config(chunk), "final_logit_softcapping", None):
        _refuse_with(f"final_logit_softcapping={capped}")


def _is_changed(name: str, part: OutputPart) -> bool:
    """Return whether the output layer's ``part`` does more than Megatron's when it is called.

    ``name`` is its name in the model chunk.
    """
    return (
        type_before_parametrizations(part) is not OutputPart
        # An output layer within a wrapper, such as an adapter, has another name.
        or not name.endswith("output_layer")
        or "forward" in vars(part)
        or any(map(len, (part._forward_hooks, part._backward_hooks, part._backward_pre_hooks)))
        or not all(map(_waits_for_parameters, part._forward_pre_hooks.values()))
    )


def _waits_for_parameters(hook: Any) -> bool:
    """Return whether ``hook`` is DistributedDataParallel's hook for overlapped gathers."""
    return getattr(hook, "__module__", "").startswith("megatron.core.distributed")


def _refuse_with(what: str) -> NoReturn:
    raise ValueError(
        f"--pipeline-vocab-parallel does not go with {what}: each rank computes its part of the "
        "logits from the output layer's weight, without calling the layer; drop "
        "--pipeline-vocab-parallel"
    )


def await_tables(models: Sequence[torch.nn.Module]) -> None:
    """Wait for the gathers of embedding and output rows, once all gathers of the step have begun.

    With overlapped gathers a reader of a weight waits for it first. Megatron has hooks for that on
    each module's call, but our passes call no module. A wait before the step's gathers would itself
    gather the parts, and the step would repeat these gathers during the passes that read them.
    """
    for part in dict.fromkeys(_parts(models)):
        # The loop includes inner modules, since the rows may be computed from their parameters.
        for module in part.modules():
            for hook in filter(_waits_for_parameters, module._forward_pre_hooks.values()):
                hook(module, ())


def shard_of(
    models: Sequence[torch.nn.Module],
    config: Any,
    pipeline: dist.ProcessGroup,
    tensor_parallel: dist.ProcessGroup,
) -> VocabularyShard:
    """Return this rank's part of the vocabulary, for the passes of a step."""
    embedding, output = _parts(models)
    return VocabularyShard(
        embedding,
        output,
        first_row=vocabulary_part(pipeline, tensor_parallel).index * len(output.weight),
        tensor_parallel=tensor_parallel if tensor_parallel.size() > 1 else None,
        sequence_parallel=config.sequence_parallel,
    )
