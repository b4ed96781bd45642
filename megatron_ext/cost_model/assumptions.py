"""Settings of a training that the cost model ignores or that no measurement has checked.

An estimate looks the same whether it was checked or not. So each such setting has a line on what is
assumed of it, which plans print below their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ext.base.words import argument_flag
from megatron_ext.cost_model.description import describe, execution_of
from megatron_ext.cost_model.execution import Execution


@dataclass(frozen=True)
class _Assumption:
    """Assumption of the cost model about one of Megatron's arguments.

    Its fields are the name of the argument, a test of whether the argument's value changes costs,
    and the text of the assumption.
    """

    setting: str
    is_on: Callable[[Any], bool]
    text: str


_ASSUMPTIONS = (
    _Assumption(
        "spec",
        lambda value: value[0] != "local" and not _is_megatrons(value[0]),
        "layers of your own count as Megatron's of these dimensions",
    ),
    _Assumption(
        "heterogeneous_layers_config_path", bool, "all layers count as of the same dimensions"
    ),
    _Assumption(
        "attention_backend",
        lambda value: getattr(value, "name", value) == "unfused",
        "attention counts as fused, which stores no matrix",
    ),
    _Assumption("use_kitchen", bool, "its kernels count as Transformer Engine's"),
    _Assumption(
        "moe_expert_capacity_factor",
        lambda value: True,
        "no token is dropped, and none padded: all count, the same for each expert",
    ),
    _Assumption(
        "overlap_moe_expert_parallel_comm",
        bool,
        "{} of the time of experts' messages hides where two passes run as a pair",
    ),
    _Assumption(
        "moe_shared_expert_overlap", bool, "the shared expert hides nothing of experts' messages"
    ),
    _Assumption(
        "fine_grained_activation_offloading", bool, "what Megatron offloads counts as kept"
    ),
    _Assumption("cpu_offloading", bool, "what Megatron offloads counts as kept"),
    _Assumption(
        "use_megatron_fsdp", bool, "each rank counts as having its stages' whole parameters"
    ),
    _Assumption("sft", bool, "samples count as one sequence each, not as packed ones"),
)


def _is_megatrons(module: str) -> bool:
    """Return whether the layers of the Python ``module`` are Megatron's own, whose costs are
    known."""
    return module.split(".")[:3] == ["megatron", "core", "models"]


def assumptions(settings: Any, share: Callable[[], str]) -> str | None:
    """Return a line on those of Megatron's arguments that the cost estimates ignore; None if none.

    Settings that no measurement has checked are named too.

    Args:
        settings: Megatron's arguments.
        share: function that returns, in words, the share of the time of experts' messages that
            overlapped passes hide.
    """
    named = list(_named(settings, share))
    unknown = describe(settings).unknown
    if unknown:
        named.append(f"{', '.join(unknown)}: ignored in times and memory")
    parts = [f"the estimate does not know {'; '.join(named)}"] if named else []
    parts += filter(None, [not_checked(execution_of(settings, sequence=1, micro_batch=1))])
    return ". ".join(parts) or None


_NODE = 8  # number of GPUs in a node


def not_checked(execution: Execution) -> str | None:
    """Return a line on the settings whose estimate no measurement has checked; None if there are
    none."""
    parts = unchecked_parts(execution)
    return f"not checked against measurements: {', '.join(parts)}" if parts else None


def unchecked_parts(execution: Execution) -> tuple[str, ...]:
    """Return the settings of ``execution`` whose cost estimate no measurement has checked, in
    words.

    docs/estimated-costs.md has the measurements.
    """
    experts = execution.expert_parallel * execution.expert_tensor_parallel
    return tuple(
        text
        for is_used, text in (
            (execution.expert_parallel > 1 and experts > _NODE, "experts across nodes"),
            (execution.context_parallel > 1, "context parallelism"),
            (execution.precision.is_quantized, f"matrices in {execution.precision}"),
        )
        if is_used
    )


def _named(settings: Any, share: Callable[[], str]) -> Iterator[str]:
    for assumption in _ASSUMPTIONS:
        value = getattr(settings, assumption.setting, None)
        if value is not None and assumption.is_on(value):
            flag = argument_flag(assumption.setting)
            words = f"{flag} {' '.join(value)}" if assumption.setting == "spec" else flag
            text = assumption.text
            yield f"{words}: {text.format(share()) if '{}' in text else text}"
