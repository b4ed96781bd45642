"""Masks that keep the documents of a sample apart (`--reset-attention-mask`).

Training scripts give the mask to the first and the last stage only. Layers that apply a mask see
across documents on all other stages, under Megatron's own schedules too. Only Megatron's local
layers with the unfused softmax apply it: Transformer Engine and the fused kernel are causal.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.base.words import counted

WHY = "layers apply the mask, which scripts give to the first and the last stage only"
REMEDY = (
    "write --dataloader-inter-document-masking, which needs --transformer-impl transformer_engine"
)

_LONGEST_FUSED = 4096  # longest sequence in tokens that Megatron's fused kernel takes
# Up to this many tokens of a sequence, a block of Megatron's fused softmax kernel handles 8 rows of
# scores; in longer sequences 4.
_SHORT = 128


def masks_are_applied(settings: Any) -> bool:
    """Return whether a model's layers apply a mask that keeps documents of a sample apart.

    ``settings`` are Megatron's arguments, or a config with the same names.
    """
    is_made = all(
        getattr(settings, name, True)
        for name in ("create_attention_mask_in_dataloader", "create_attention_mask")
    )
    is_local = getattr(settings, "transformer_impl", None) == "local"
    return is_made and is_local and not (_has_windows_only(settings) or _is_fused(settings))


def _has_windows_only(settings: Any) -> bool:
    """Return whether all layers have sliding windows, which replace any mask."""
    has_windows = getattr(settings, "window_size", None) is not None
    return has_windows and getattr(settings, "window_attn_skip_freq", None) is None


def _is_fused(settings: Any) -> bool:
    """Return whether Megatron uses its fused softmax, which ignores masks.

    The softmax is `FusedScaleMaskSoftmax`.
    """
    is_half = any(getattr(settings, name, False) for name in ("fp16", "bf16"))
    is_plain = getattr(settings, "softmax_type", "vanilla") == "vanilla"
    if not (getattr(settings, "masked_softmax_fusion", False) and is_half and is_plain):
        return False
    tokens = settings.seq_length
    heads = settings.num_attention_heads // settings.tensor_model_parallel_size
    rows = settings.micro_batch_size * heads
    of_a_block = 8 if tokens <= _SHORT else 4
    return 16 < tokens <= _LONGEST_FUSED and tokens % 4 == 0 and rows % of_a_block == 0


def why_documents_mix(args: Any) -> str | None:
    """Return why tokens attend to other documents of their sample; None if they do not.

    The reason holds for any schedule with the stages of the validated ``args``.
    """
    stages = args.pipeline_model_parallel_size * (args.virtual_pipeline_model_parallel_size or 1)
    if not args.reset_attention_mask or stages <= 2 or not masks_are_applied(args):
        return None
    return (
        f"--reset-attention-mask: on {counted(stages - 2, 'stage')} of {stages} tokens attend to "
        f"other documents, under Megatron's own schedules too: {WHY}"
    )
