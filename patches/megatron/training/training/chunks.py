"""Chunks that the user did not request: Megatron's training loop expects one model and one data
iterator a rank, and gets lists.

Under several chunks ``model`` is a list of chunks, and ``data_iterator`` a list of their iterators,
with None for a chunk that reads nothing. Code that treats either as a single object would fail, or
train on part of the data. All uses in Megatron have been read, and are listed below; two of them
are patched here.

Not patched: everything else. One object that is both a list and an iterator would not do: Megatron
reads a list as sets in one place and as chunks in another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training.global_vars import get_args

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap

# Uses of the lists of models and data iterators in pretrain: it builds iterators chunk by chunk
# (`loaders`) and passes on whole lists. It uses the config of ``model[0]``, which is that of all
# chunks.

# Uses of the lists of models and data iterators in setup_model_and_optimizer: the groups and the
# config of ``model[0]`` are those of all chunks. Hooks of saved and loaded logits go to
# ``model[-1]``, which has the output layer. Models with init_state_dict_from_bert have no pipeline.
# Upcycling confuses the models of several chunks, and is refused.

# Uses of the lists of models and data iterators in dummy_train_step (of --iterations-to-skip),
# which is patched in this file: it calls next() on the list of iterators.

# Uses of the lists of models and data iterators in train_step: it passes both lists to the schedule
# and to the rerun machine. ``model[0]`` has hooks if any chunk has them. Gradients, logs of
# activations and qk_clip are for all chunks. DINO (--vision-pretraining) updates ``model[0]``
# alone, but Megatron no longer has such a model.

# Uses of the lists of models and data iterators in train: it makes lists of no_sync_func,
# grad_sync_func and param_sync_func, which our step accepts. Reinforcement learning, which reads
# the weights of ``model[0]`` here and in megatron/rl/rl_utils.py, is refused. Every schedule
# refuses --hybrid-context-parallel, which wraps a single iterator.

# Uses of the lists of models and data iterators in evaluate: it takes the groups of ``model[0]``
# and passes both lists to the schedule. The caller's non_loss_data_func gets the list of models.

# Uses of the lists of models and data iterators in evaluate_and_print_results, which is patched in
# this file: it takes the iterators of the chunks for those of several validation sets.

# Uses of the lists of models and data iterators in save_checkpoint_and_time: it takes the groups of
# ``model[0]`` and passes the iterators on.

# Uses of the lists of models and data iterators in Megatron's other files:
# megatron/training/checkpointing.py (see `checkpointing.chunks`); megatron/training/utils, whose
# norms, hashes and flags are for all chunks; megatron/core/rerun_state_machine.py, which goes
# through a list and compares its length with that of a checkpoint (see
# `checkpointing.pending_step`); megatron/core/full_cuda_graph.py and
# megatron/core/transformer/moe/paged_stash.py, which take lists and are refused by every schedule.

# Uses of the lists of models and data iterators in the other files of megatron/core:
# distributed/finalize_model_grads.py takes the tables of ``model[0]`` and ``model[-1]``, which have
# them, or is patched. optimizer takes the configs of ``model_chunks[0]``, which are those of all
# chunks, and asserts that a MimoModel has one chunk. transformer/cuda_graphs.py and
# transformer/moe/router_trace.py go through all chunks. resharding/refit.py takes ``model[0]`` for
# reinforcement learning.

_TRAINING = "megatron.training.training"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches for skipped iterations and validation sets with several chunks."""
    return (
        wrap(
            f"{_TRAINING}:dummy_train_step",
            skip_step,
            reason="an iteration that is skipped must skip the data of every chunk of a rank",
            digests={"0.18": "8808da517f8a", "0.19, 0.20": "268bd1644fa5"},
        ),
        wrap(
            f"{_TRAINING}:evaluate_and_print_results",
            evaluate_by_sets,
            reason="Megatron mistakes the list of chunks' iterators for several validation sets",
            digests={"0.18": "0b2d4c8a8a03", "0.19, 0.20": "ecf88390c9c5"},
        ),
    )


def skip_step(original: Callable[[Any], None], data_iterator: Any) -> None:
    """Skip an iteration: read its microbatches from the iterator of every chunk, and drop them.

    So tokens and labels, which different chunks read, stay aligned. Megatron also broadcasts the
    microbatches among tensor-parallel ranks, which changes nothing.
    """
    if not isinstance(data_iterator, list):
        original(data_iterator)
        return
    while get_rerun_state_machine().should_run_forward_backward(data_iterator):
        for iterator in data_iterator:
            for _ in range(get_num_microbatches() if iterator is not None else 0):
                next(iterator)


def evaluate_by_sets(
    original: Callable[..., None],
    prefix: str,
    forward_step_func: Any,
    data_iterator: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Run ``original``, which evaluates, with data iterators by validation set, then by chunk."""
    lengths = get_args().eval_iters
    if isinstance(data_iterator, list) and isinstance(lengths, list):
        data_iterator = _by_sets(data_iterator, len(lengths))
    original(prefix, forward_step_func, data_iterator, *args, **kwargs)


def _by_sets(chunks: list[Any], sets: int) -> list[list[Any]]:
    """Return data iterators by validation set and chunk; ``chunks`` has them by chunk and set.

    A chunk that reads nothing has None, or a list of Nones.
    """
    by_chunk = []
    for iterators in chunks:
        if iterators is None or iterators == [None] * len(iterators):
            iterators = [None] * sets
        by_chunk.append(iterators)
    return [list(of_set) for of_set in zip(*by_chunk, strict=True)]
