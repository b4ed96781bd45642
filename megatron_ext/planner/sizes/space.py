"""All parallel sizes that a training job could have on its GPUs.

Only divisions and Megatron's known rules are checked here. Megatron's own validation checks the
sizes that a search recommends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from megatron_ext.planner.sizes.described_job import SizedJob
from megatron_ext.planner.sizes.sizes import Sizes

# Largest tensor-parallel size that is tried. No public recipe has a larger one, whatever the size
# of its NVLink domain.
_MOST_TENSOR = 8
_MOST_CONTEXT = 16
_MOST_MICRO_BATCH = 16
_LEAST_SEQUENCE = 1024  # least number of tokens of a sequence on a context-parallel rank
# Symbols of layers that context parallelism splits in other ways than attention.
_WHOLE_SEQUENCE = frozenset("GM")


def space(job: SizedJob) -> Iterator[Sizes]:
    """Yield the parallel sizes that ``job`` may have on its GPUs, its own sizes first."""
    yield job.sizes
    for tensor, context in product(_tensor(job), _context(job)):
        if job.gpus % (tensor * context):
            continue
        for pipeline in _divisors(job.gpus // (tensor * context)):
            if pipeline > len(job.model.layers) + 1:
                continue
            for sizes in _of_batches(job, tensor, context, pipeline):
                if sizes != job.sizes:
                    yield sizes


def _of_batches(job: SizedJob, tensor: int, context: int, pipeline: int) -> Iterator[Sizes]:
    has_experts = job.model.num_experts > 0
    if tensor == 1:
        splits = [False]
    elif has_experts:  # Megatron requires sequence parallelism for experts with tensor parallelism.
        splits = [True]
    else:
        splits = sorted({True, job.sizes.sequence_parallel}, reverse=True)
    experts = _experts(job, tensor, pipeline) if has_experts else [(1, 1)]
    micro_batches = {*_powers(_MOST_MICRO_BATCH), job.sizes.micro_batch}
    for micro_batch, (expert, expert_tensor), split in product(
        sorted(micro_batches), experts, splits
    ):
        sizes = Sizes(tensor, pipeline, context, expert, expert_tensor, micro_batch, split)
        if job.microbatches(sizes) and not sizes.data_parallel(job.gpus) % job.instances:
            yield sizes


def _tensor(job: SizedJob) -> list[int]:
    model = job.model
    most = min(_MOST_TENSOR, job.rates.domain)
    groups = model.num_attention_heads if model.multi_latent_attention else model.num_query_groups
    divided = [model.num_attention_heads, groups, model.ffn_hidden_size]
    if job.tokens is None:
        divided.append(model.vocabulary)
    fitting = (size for size in _powers(most) if not any(n % size for n in divided))
    return sorted({*fitting, job.sizes.tensor})


def _context(job: SizedJob) -> list[int]:
    sequence = job.execution.sequence
    if _WHOLE_SEQUENCE & set("".join(job.model.layers)):
        return [job.sizes.context]
    fitting = (
        size
        for size in _powers(min(_MOST_CONTEXT, sequence // _LEAST_SEQUENCE))
        if size == 1 or sequence % (2 * size) == 0
    )
    return sorted({1, *fitting, job.sizes.context})


def _experts(job: SizedJob, tensor: int, pipeline: int) -> Iterator[tuple[int, int]]:
    """Yield the possible sizes of expert parallelism with those of expert tensor parallelism."""
    ranks = job.gpus // pipeline
    for expert_tensor in sorted({1, tensor}):
        for expert in _powers(job.model.num_experts):
            is_uneven = job.model.num_experts % expert or ranks % (expert * expert_tensor)
            if not is_uneven:
                yield expert, expert_tensor


def _powers(most: int) -> list[int]:
    return [2**n for n in range(max(most, 1).bit_length())]


def _divisors(number: int) -> Iterable[int]:
    return (n for n in range(1, number + 1) if number % n == 0)
