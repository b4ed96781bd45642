"""Better pipeline schedules for stock Megatron-LM.

``python -m megatron_ext pretrain_gpt.py ... --pipeline-schedule zb-h1`` launches a script of yours;
`install` serves code that calls Megatron itself.
"""

import sys
from typing import TYPE_CHECKING

if sys.version_info < (3, 12):  # noqa: UP036  (older ones run this much of a checkout)
    raise ImportError(
        f"megatron_ext needs Python 3.12 or later; {sys.executable} is {sys.version.split()[0]}",
        name=__name__,  # with this name python -m prints the version in place of a traceback
    )

from megatron_ext.base import logger  # noqa: F401  (sets it up before anybody logs)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from typing import Any

    import torch

    from megatron_ext.patches.engine import Handle
    from megatron_ext.patches.megatron.core.models.gpt.gpt_model.shared_prompts import (
        SharedPromptBatch,
    )

__all__ = ["__version__", "install", "order_microbatches", "share_prompts"]
__version__ = "0.2.0"


# The keywords and their lines in the docstring are those of `PipelineConfig`. They are written by
# python -m pytest --write-pages tests/unit/house/test_flags_page.py.
def install(
    schedule: str | None = None,
    *,
    memory_limit: str | None = None,
    costs: str | None = None,
    rank_speeds: str | None = None,
    p2p: str | None = None,
    vocab_parallel: str | None = None,
    activation_offload: str | None = None,
    recompute: str | None = None,
    slices: str | None = None,
    slice_lengths: str | None = None,
    join_slice_weights: bool | None = None,
    post_validation: bool | None = None,
    microbatch_order: str | None = None,
    deal_microbatches: bool | None = None,
    microbatch_weights: str | None = None,
    report_split: bool | None = None,
    metrics: bool | None = None,
    trace: str | None = None,
    trace_iters: str | None = None,
    race: str | None = None,
    race_then: str | None = None,
    shared_prompts: str | None = None,
) -> "Handle":
    """Make Megatron train under ``schedule``, in this process, from now on.

    Without a schedule Megatron's own pipeline runs, and ``trace="DIR"`` traces it; or
    ``race="zb-h1 zb-1p"`` has several take turns.

    Call it before the model is built. The settings are those of the flags, which docs/flags.md
    explains: ``--pipeline-memory-limit 60GiB`` is ``memory_limit="60GiB"``,
    ``--pipeline-post-validation`` is ``post_validation=True``, and None is what a flag has when it
    is not given.

    Args:

        schedule (str): Pipeline schedule: NAME[:key=value,...] ('megatron-ext schedules' lists
            names), a CSV file of compute actions with a row per rank, a Python file with a family,
            auto or plan. auto chooses placement, chunks and order of passes for this launch
            (auto:placement=v,chunks=2 fixes the first two). plan compares all schedules, with and
            without vocabulary parallelism.
        memory_limit (str): Most activations that a rank may store: 5 (those of 5 microbatches in
            all its stages), 0.5x (half of 1F1B's peak) or 60GiB.
        costs (str): Costs for which the schedule is made: estimate, profile, profile:FILE, FILE, or
            times. estimate (the default) takes them from the model's dimensions. profile measures
            them in the first iterations, writes FILE (costs.json in the folder of --save, else of
            --pipeline-trace, else in the working directory), and rebuilds the schedule.
        rank_speeds (str): Speed of each pipeline rank relative to the costs: with 1,1,0.77,1 rank 2
            takes 1.3 times as long as its costs say.
        p2p (str): Communicators for messages: async (the default) creates a process group for each
            pair of neighbouring ranks, direction and kind of message. batched uses Megatron's group
            of the pipeline, for clusters where communicators take too much memory or too many
            multiprocessors.
        vocab_parallel (str): Vocabulary parallelism: 1 or 2 partition the embedding and the output
            layer over all pipeline ranks, and schedule their passes. 1 stores two more
            microbatches, 2 stores one more.
        activation_offload (str): Activations to copy to host memory until they are needed: none
            (the default), half, full or fit. half copies those of the longer-lived half of a rank's
            chunks, full all that the host link carries without delaying a pass, and fit as few as
            meet --pipeline-memory-limit.
        recompute (str): Activations to recompute before their backward pass, in a bubble if there
            is one: none (the default), fit or first:N.
        slices (str): Number of slices into which each sequence is cut.
        slice_lengths (str): Lengths of the slices: even (the default), balanced (equal work: later
            slices are shorter, as they attend to more), or token counts such as
            4096,2048,1024,1024.
        join_slice_weights (bool): Compute each weight's gradient once for all slices of a
            microbatch, after the last of their input gradients.
        post_validation (bool): Experimental: overlap consecutive steps.
        microbatch_order (str): Order of a step's microbatches: arrival (the default), or small-ends
            (the most costly microbatches in the middle), which shortens the waits of all schedules,
            Megatron's too.
        deal_microbatches (bool): Deal the microbatches of the global batch to data-parallel
            replicas by their cost, so that all replicas take about the same time.
        microbatch_weights (str): Costs of samples, by which microbatches are ordered and dealt: a
            numpy array of positive numbers, indexed as the training data set is.
        report_split (bool): After the first step, print the share of the weight gradients that are
            computed in passes of their own (W), for each rank of the pipeline with global rank 0.
        metrics (bool): Log pipeline metrics as often as Megatron logs, also to TensorBoard and W&B:
            bubble and step time (each measured and predicted), slowest rank, and peak memory.
        trace (str): Write DIR/trace.json for Perfetto: measured and predicted times of each pass,
            for the pipeline (data-parallel replica) with the last global rank.
        trace_iters (str): Training iterations to trace: A to B-1, as Megatron's log counts them.
        race (str): Schedules to time against a plain schedule (the baseline) and against each
            other, in turns of a few iterations of this training, whose numbers do not change.
        race_then (str): Schedule under which the training goes on after a race: the fastest one
            with winner (the default), the baseline with report.
        shared_prompts (str): Prompts that several answers of a microbatch share: none (the
            default), exact or losses-once. exact computes each prompt once, if
            megatron_ext.share_prompts describes it, and refuses losses that balance experts.

    Returns:
        A handle: ``handle.undo()``, or leaving ``with install(...):``, restores stock Megatron.

    Raises:
        TypeError: there is no such keyword.
        ValueError: a setting that is not understood.
        PatchError: Megatron is not as the patches know it, a model has been built already, or
            something holds a patched function where it cannot be replaced. Nothing is changed.
    """
    settings = {**locals()}
    from megatron_ext.config import PipelineConfig
    from megatron_ext.launch.installation import install as install_config

    return install_config(PipelineConfig.parse(**settings))


def order_microbatches(
    forward_backward: "Callable[..., Any]", cost: "Callable[[Any], float]"
) -> "Callable[..., Any]":
    """Return ``forward_backward``, Megatron's schedule function, with the most costly microbatches
    of each training step in the middle, under any schedule.

    It is for callers that make their own batches; where Megatron's data loaders make them, write
    ``--pipeline-microbatch-order``. A call reads its ``num_microbatches`` items from each iterator
    before its first pass, and no more. Results come back in the order of arrival; with
    ``forward_only`` nothing changes. All ranks of a replica have to call it; they use the order of
    the first one that has data.

    Args:
        cost: function that returns the cost of an item of the data iterator, in any unit.
    """
    from megatron_ext.adapter.step.ordered_calls import order_microbatches as ordered

    return ordered(forward_backward, cost)


def share_prompts(
    lengths: "Sequence[int]",
    prompts: "Sequence[int]",
    groups: "Sequence[Hashable]",
    *,
    multiple: int = 1,
    device: "torch.device | str | None" = None,
) -> "SharedPromptBatch":
    """Return a microbatch in which sequences with the same prompt share its tokens, so that a
    GPTModel computes them once.

    It is for callers that make their own batches, such as the sampled answers of reinforcement
    learning, and requires the setting ``shared_prompts``. The model is called with the result's
    ``packed_seq_params``, ``position_ids`` and ``once(tokens)``, and ``in_sequences(output)`` is
    its output for the sequences, one behind the other.

    Args:
        lengths: tokens of each sequence, its prompt included.
        prompts: tokens of each sequence's prompt.
        groups: what sequences with the same prompt have in common, and others do not: any value.
        multiple: number of which the tokens of the row are a multiple: the tensor parallel ranks
            with sequence parallelism, or a block of FP8.
        device: device of the model; the current GPU if it is None.

    Raises:
        ValueError: a prompt is not within its sequence, a group has prompts of several lengths, or
            the setting is not installed.
    """
    from megatron_ext.patches.megatron.core.models.gpt.gpt_model.shared_prompts import (
        share_prompts as shared,
    )

    return shared(lengths, prompts, groups, multiple, device)
