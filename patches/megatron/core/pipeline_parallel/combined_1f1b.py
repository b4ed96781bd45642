"""Megatron's combined forward and backward step, which runs the plans of one pass or of two
overlapped ones.

Nothing is patched: our stages call it by name (`adapter.pairs.planned_stage`). Not used: its
schedules, whose order is Megatron's own.
"""

from __future__ import annotations

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import Patch, expect

_COMBINED = "megatron.core.pipeline_parallel.combined_1f1b"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the expected signature of Megatron's combined forward and backward step."""
    return (
        expect(
            f"{_COMBINED}:combined_forward_backward_step",
            reason="this function runs overlapped passes, and single passes by a schedule plan",
            signature="(forward_step_func, data_iterator, f_model, num_microbatches, input_tensor, "
            "forward_data_store, b_model, b_input_tensor, b_output_tensor, b_output_tensor_grad, "
            "config, f_model_chunk_id=None, pre_forward=None, pre_backward=None, "
            "post_forward=None, post_backward=None, collect_non_loss_data=False, "
            "checkpoint_activations_microbatch=None, is_first_microbatch=False, "
            "current_microbatch=None, encoder_decoder_xattn=False, fsdp_wrapper=None)",
        ),
    )
