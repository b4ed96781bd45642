"""Launches whose microbatches cannot be ordered or dealt, each refused with its reason.

The order is made from the dataset's index, so a loader that has none cannot be arranged. Some
losses are running means over microbatches, and change with their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ext.config import PipelineConfig, flag


def check_arrangement(args: Any, config: PipelineConfig) -> None:
    """Raise ValueError if microbatches cannot be ordered or dealt under validated ``args``."""
    name = "deal_microbatches" if config.deal_microbatches else "microbatch_order"
    for why in _reasons(args, config):
        raise ValueError(f"{flag(name)}: {why}")


def _reasons(args: Any, config: PipelineConfig) -> Iterator[str]:
    if args.dataloader_type != "single":
        yield (
            f"--dataloader-type {args.dataloader_type} has a sampler of its own; write "
            f"--dataloader-type single, or order the microbatches where they are made"
        )
    if getattr(args, "sft", False):
        yield "--sft pads all samples to the whole length, and all cost the same; drop the flag"
    masks = getattr(args, "dataloader_inter_document_masking", False)
    if not masks and config.microbatch_weights is None:
        yield (
            "all microbatches cost the same, since each token attends to all earlier tokens; add "
            "--dataloader-inter-document-masking (Megatron 0.19; dataset.inter_document_masking in "
            "Megatron-Bridge), give other costs by --pipeline-microbatch-weights, or drop the flag"
        )
    if getattr(args, "hybrid_context_parallel", False):
        yield "--hybrid-context-parallel deals sequences by itself; drop the flag"
    if getattr(args, "phase_transition_iterations", None):
        yield (
            "--phase-transition-iterations counts the samples of a phase anew, and the borders of "
            "steps would be lost; drop the flag"
        )
    kinds = args.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if args.num_experts and "global_aux_loss" in kinds:
        yield (
            "global_aux_loss keeps a running mean over microbatches, which depends on their order; "
            "write --moe-router-load-balancing-type aux_loss, or drop the flag"
        )
    if config.deal_microbatches and args.data_parallel_size == 1:
        yield "there is one data-parallel replica, and no other to deal to; drop the flag"
