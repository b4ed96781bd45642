"""Better pipeline schedules for stock Megatron-LM.

``python -m megatron_ext pretrain_gpt.py ... --pipeline-schedule zb-h1`` launches a script of yours;
`install` serves code that calls Megatron itself.
"""

import sys
from typing import TYPE_CHECKING

if sys.version_info < (3, 12):  # noqa: UP036  (older ones run this much of a checkout)
    raise ImportError(
        f"megatron_ext needs Python 3.12 or later; {sys.executable} is {sys.version.split()[0]}",
        name=__name__,  # so that python -m prints this line, and no traceback
    )

from megatron_ext.base import logger  # noqa: F401  (sets it up before anybody logs)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from megatron_ext.patches.engine import Handle

__all__ = ["__version__", "install", "order_microbatches"]
__version__ = "0.2.0"


def install(schedule: str | None = None, **settings: str | bool | None) -> "Handle":
    """Make Megatron train under ``schedule``, in this process, from now on.

    Without a schedule Megatron's own pipeline runs, and ``trace="DIR"`` traces it; or
    ``race="zb-h1 zb-1p"`` has several take turns.

    Call it before the model is built. The settings are those of the flags (docs/flags.md has all):
    ``--pipeline-memory-limit 60GiB`` is ``memory_limit="60GiB"``, ``--pipeline-post-validation`` is
    ``post_validation=True``, and None is what a flag has when it is not given.

    Returns:
        A handle: ``handle.undo()``, or leaving ``with install(...):``, restores stock Megatron.

    Raises:
        TypeError: there is no such setting.
        ValueError: a setting that is not understood.
        PatchError: Megatron is not as the patches know it, a model has been built already, or
            something holds a patched function where it cannot be replaced. Nothing is changed.
    """
    from megatron_ext.config import PipelineConfig
    from megatron_ext.launch.installation import install as install_config

    return install_config(PipelineConfig.parse(schedule=schedule, **settings))


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
    from megatron_ext.adapter.batches.ordered_calls import order_microbatches as ordered

    return ordered(forward_backward, cost)
