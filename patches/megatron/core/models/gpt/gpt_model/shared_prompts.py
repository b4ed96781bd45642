"""GPTModel that runs rows in which answers share their prompts.

Megatron's PackedSeqParams describe a packed row to all layers, which would treat a prompt and each
of its answers as separate documents. The PackedSeqParams are replaced where the model is called.

Not patched: the layers, to which such a row is one document; the output layer and the losses, which
go token by token.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from megatron_ext.config import PipelineConfig
from megatron_ext.features.shared_prompts.adapter.batch import SharedPromptBatch
from megatron_ext.features.shared_prompts.adapter.shared_model_call import SharedModelCall
from megatron_ext.patches.engine import Patch, applied, wrap

_MODEL = "megatron.core.models.gpt.gpt_model:GPTModel"
_FORWARD = f"{_MODEL}.forward"
_REASON = "its layers take a row with shared prompts as one document"


def patches(config: PipelineConfig) -> tuple[Patch, ...]:
    """Return the patches by which a GPTModel runs rows in which answers share one prompt."""
    call = SharedModelCall(config.shared_prompts)
    return (
        wrap(_FORWARD, call.forward, reason=_REASON),
        wrap(
            f"{_MODEL}.build_schedule_plan",
            call.plan,
            reason="schedule plans of overlapped passes do not know where sequences end",
        ),
    )


def share_prompts(
    lengths: Sequence[int],
    prompts: Sequence[int],
    groups: Sequence[Hashable],
    multiple: int,
    device: torch.device | str | None,
) -> SharedPromptBatch:
    """Return a microbatch of packed answers with shared prompts, for `megatron_ext.share_prompts`.

    Raises:
        ValueError: the setting ``shared_prompts`` is not installed, or `SharedPromptBatch` refuses
            the arguments.
    """
    if not any(patch.target == _FORWARD and patch.reason == _REASON for patch in applied()):
        raise ValueError(
            "share_prompts needs the setting shared_prompts: install it before the model is built "
            'by megatron_ext.install(shared_prompts="exact"), MEGATRON_EXT_SHARED_PROMPTS=exact or '
            "--pipeline-shared-prompts exact"
        )
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return SharedPromptBatch(lengths, prompts, groups, multiple, torch.device(device))
