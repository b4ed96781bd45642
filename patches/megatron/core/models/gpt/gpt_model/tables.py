"""Models whose embedding and output layer are sharded over all pipeline ranks.

Megatron is made to build tiny tables: their vocabulary has one token for each tensor-parallel rank.
These tables are removed, and the first chunk of every rank gets the rank's shards of the real
tables (`vocabulary`), under the names that Megatron gives the tables. The first stage then takes
the embeddings that the ranks have looked up, and the last one ends with its hidden states.

Not patched: `_preprocess`, `forward` and `_postprocess`, which work as on other stages; the tying
of two copies, as there is only one copy; position embeddings, dropout and norms, which stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.config import PipelineConfig
from megatron_ext.features.vocabulary.adapter.vocabulary_rows import (
    EmbeddingPart,
    OutputPart,
    check_divisible,
    vocabulary_part,
)
from megatron_ext.patches.engine import Patch, expect, wrap
from megatron_ext.schedule.problem import ScheduleOptions

_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches that shard the embedding and the output layer of a GPTModel."""
    resolved, vocabulary = config.resolved_spec, config.vocab_parallel

    def build(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(model, *args, **kwargs)
        call.apply_defaults()
        settings = call.arguments["config"]
        if settings.pipeline_model_parallel_size == 1:
            original(model, *args, **kwargs)
            return
        if type(model) is not GPTModel:
            raise ValueError(
                f"--pipeline-vocab-parallel {vocabulary} partitions the embedding and the output "
                f"layer of a GPTModel; {type(model).__name__} is a subclass, which may use these "
                "layers differently: drop --pipeline-vocab-parallel"
            )
        if call.arguments.get("logit_dtype") is not None:  # an argument since Megatron 0.20
            raise ValueError(
                f"--pipeline-vocab-parallel {vocabulary} does not go with "
                f"logit_dtype={call.arguments['logit_dtype']}: the loss is made by passes of the "
                f"schedule, in fp32 from parts of the logits; drop --logit-dtype"
            )
        refuse(settings, resolved, ScheduleOptions(vocab_parallel=vocabulary))
        build_divided(original, model, call)

    return (
        wrap(
            f"{_MODEL}.__init__",
            build,
            reason="each rank holds a part of the embedding and of the output layer",
            digests={
                "0.18": "038b34702737",
                "0.19": "2127a9981edd",
                "0.20": "8a67e5f92cdb",
                "0.20@2a75ac1": "4ae5b7e53bc8",
            },
        ),
        wrap(
            f"{_MODEL}.set_input_tensor",
            take_embeddings,
            reason="the first stage gets its input from the vocabulary's embedding passes",
            signature="(self, input_tensor)",
        ),
        expect(
            f"{_MODEL}._postprocess",
            reason="this function returns hidden states if the stage has no post_process",
            digests={"0.18": "7dc649b768c7", "0.19, 0.20": "6c489f3a1567"},
        ),
        expect(
            "megatron.core.models.common.embeddings.language_model_embedding:"
            "LanguageModelEmbedding.forward",
            reason="the embedding adds positions to the result of its table's lookup",
            digests={"0.18, 0.19, 0.20": "53d0b74775ed"},
        ),
        expect(
            "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
            reason="embedding passes repeat what this function does after its lookup",
            digests={"0.18": "8db24043b909", "0.19, 0.20": "8862b2f9d30b"},
        ),
    )


def build_divided(original: Callable[..., None], model: Any, call: inspect.BoundArguments) -> None:
    """Build ``model`` with this rank's shards of embedding and output layer, not whole ones."""
    vocabulary = call.arguments["vocab_size"]
    tied = call.arguments["share_embeddings_and_output_weights"]
    config = call.arguments["config"]
    call.arguments["vocab_size"] = config.tensor_model_parallel_size
    call.arguments["share_embeddings_and_output_weights"] = False
    original(*call.args, **call.kwargs)

    groups = model.pg_collection
    part = vocabulary_part(groups.pp, groups.tp)
    check_divisible(vocabulary, part.size())
    model.vocab_size = vocabulary
    if model.post_process:
        del model.output_layer
        model.post_process = False
    if model.pre_process:
        embedding = model.embedding
        embedding.vocab_size = vocabulary
        scatters = embedding.reduce_scatter_embeddings
        embedding.word_embeddings = EmbeddingPart(model, part, reduce_scatter=scatters)
    elif (model.vp_stage or 0) == 0:
        model.embedding = MegatronModule(config)
        model.embedding.word_embeddings = EmbeddingPart(model, part)
    else:
        return
    if not tied:
        model.output_layer = OutputPart(model, part)


def take_embeddings(original: Callable[..., None], model: Any, input_tensor: Any) -> None:
    """Give the first stage the embeddings that all ranks looked up, other stages their input."""
    if not model.pre_process:
        original(model, input_tensor)
        return
    (embeddings,) = input_tensor if isinstance(input_tensor, list) else [input_tensor]
    model.embedding.word_embeddings.embeddings = embeddings
