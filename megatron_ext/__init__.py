"""Better pipeline schedules for stock Megatron-LM.

``python -m megatron_ext pretrain_gpt.py ... --pipeline-schedule zb-h1`` launches a script of yours;
`install` serves code that calls Megatron itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext import logger  # noqa: F401  (sets it up before anybody logs)

if TYPE_CHECKING:
    from megatron_ext.patches.engine import Handle

__version__ = "0.1.0"


def install(
    schedule: str,
    memory_limit: str | None = None,
    costs: str | None = "estimate",
    p2p: str | None = "async",
    vocab_parallel: str | None = "none",
    activation_offload: str | None = "none",
    post_validation: bool = False,
    report_split: bool = False,
    trace: str | None = None,
    trace_iters: str | None = None,
) -> Handle:
    """Make Megatron train under ``schedule``, in this process, from now on.

    Call it before the model is built. The settings are those of the flags (``--help``).

    Returns:
        A handle: ``handle.undo()``, or leaving ``with install(...):``, restores stock Megatron.

    Raises:
        ValueError: a setting that is not understood.
        PatchError: Megatron is not as the patches know it, a model has been built already, or
            something holds a patched function where it cannot be replaced. Nothing is changed.
    """
    from megatron_ext.config import PipelineConfig
    from megatron_ext.installation import install as install_config

    return install_config(
        PipelineConfig(
            schedule,
            memory_limit,
            costs,
            p2p,
            vocab_parallel,
            activation_offload,
            post_validation,
            report_split,
            trace,
            trace_iters,
        )
    )
