"""Decisions that need a loader, made known to ranks without one: whether to train, how long to
evaluate.

Megatron queries global rank 0, and expects a loader on each rank of a pipeline's ends. If the
schedule places the first stage on another rank, rank 0 has no loader whatever the dataset provider:
the run would end at once, with exit code 0 and no step trained. So all ranks are queried.

Not patched: which ranks build datasets, which the provider decides; providers that do not take
vp_stage, which Megatron refuses by name (a provider with the same loader for two chunks would make
them read every other microbatch); --full-validation with one set, where Megatron itself fails when
it evaluates; reinforcement learning, which builds no loaders and is refused if a rank has several
chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training.global_vars import get_args

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, wrap
from megatron_ext.runtime.world import gather_from_all

_TRAINING = "megatron.training.training"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches with which all ranks tell whether they have data loaders."""
    return (
        wrap(
            f"{_TRAINING}:build_train_valid_test_data_loaders",
            ask_all_ranks,
            reason="global rank 0 decides for all whether to train, and may have no data loader",
            digests={"0.18, 0.19": "f99dfcdf670b", "0.20": "10d65b51e463"},
        ),
        wrap(
            f"{_TRAINING}:build_train_valid_test_data_iterators",
            agree_on_lengths,
            reason="ranks without a data loader do not know the lengths of validation sets",
            digests={"0.18, 0.19, 0.20": "10015fd2044a"},
        ),
    )


def ask_all_ranks(original: Callable[..., Any], provider: Callable[..., Any]) -> Any:
    """Build the data loaders of one chunk, and train or evaluate if any rank has data.

    Megatron has the same conditions, but applies them to global rank 0 alone.
    """
    train, validation, test = original(provider)
    args = get_args()
    evaluates = args.full_validation or args.eval_iters > 0
    reads = {
        "do_train": train is not None and (args.skip_train or args.train_iters > 0),
        "do_valid": validation is not None and evaluates,
        "do_test": test is not None and evaluates,
    }
    for name, anywhere in zip(reads, _largest([*reads.values()]), strict=True):
        setattr(args, name, getattr(args, name) or anywhere)
    return train, validation, test


def agree_on_lengths(original: Callable[..., Any], provider: Callable[..., Any]) -> Any:
    """Build the data iterators of one chunk, with --eval-iters kept as given until the last chunk.

    With --full-validation Megatron overwrites --eval-iters with the lengths of the validation sets,
    each time it builds a chunk's iterators. It computes the size of the test set from --eval-iters,
    so a later chunk would get other test samples than the first: tokens and labels would not match.
    Here --eval-iters gets its given value back after each chunk except the last. After the last
    chunk it is set to the lengths, on all ranks, because ranks without a loader do not know them.
    """
    args = get_args()
    flag = args.eval_iters
    iterators = original(provider)
    if args.full_validation and args.multiple_validation_sets:
        reads = any(iterator is not None for iterator in iterators[1] or ())
        here: list[int] = list(args.eval_iters) if reads else []
        (sets,) = _largest([len(here)])
        lengths = _largest(here + [0] * (sets - len(here)))
        args.eval_iters = lengths if lengths and _is_last_chunk(provider) else flag
    return iterators


def _largest(numbers: list[int]) -> list[int]:
    """Return for each of ``numbers`` its maximum over all ranks."""
    return [max(of_ranks) for of_ranks in zip(*gather_from_all(numbers), strict=True)]


def _is_last_chunk(provider: Callable[..., Any]) -> bool:
    """Return whether ``provider`` builds the datasets of the rank's last chunk."""
    chunk = getattr(provider, "keywords", {}).get("vp_stage")
    chunks = get_args().virtual_pipeline_model_parallel_size
    return chunk is None or chunks is None or chunk == chunks - 1
