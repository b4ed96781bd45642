"""Megatron's own recompute of layers: that of a launch, and its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.cost_model.activations import held_of_stage
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.stage_seconds import seconds_of_layers

FULL, SELECTIVE = "full", "selective"
_MODULES = (
    *("core_attn", "layernorm", "mla_up_proj", "mlp"),
    *("moe_act", "shared_experts", "moe"),
)
_INSIDE = {"moe": ("moe_act", "shared_experts")}  # which are run again with it
_LEAST = 0.01  # of what is held from F to I: a module that frees less frees nothing


@dataclass(frozen=True)
class LayerRecompute:
    """Recompute by the names of Megatron's arguments, each after ``recompute_``.

    Attributes:
        granularity: ``full``, ``selective``, or "": no recompute.
        modules: of selective recompute.
        method, num_layers: of full recompute.
    """

    granularity: str = ""
    modules: tuple[str, ...] = ()
    method: str = ""
    num_layers: int = 0

    @classmethod
    def of(cls, execution: Execution) -> LayerRecompute:
        """Return the recompute of ``execution``."""
        if execution.recompute:
            method, number = execution.recompute_method, execution.recompute_num_layers
            return cls(FULL, method=method, num_layers=number)
        modules = execution.recompute_modules
        return cls(SELECTIVE, _in_order(modules)) if modules else NO_RECOMPUTE

    def __str__(self) -> str:
        """For a table."""
        if self.granularity == SELECTIVE:
            return " ".join(self.modules)
        if self.method == "block":
            return f"full, {self.num_layers} a stage"
        return self.granularity or "none"

    @property
    def arguments(self) -> dict[str, Any]:
        """Megatron's arguments, by name."""
        return {
            "recompute_granularity": self.granularity or None,
            "recompute_modules": list(self.modules) or None,
            "recompute_method": self.method or None,
            "recompute_num_layers": self.num_layers or None,
        }

    @property
    def words(self) -> tuple[str, ...]:
        """The flags for it."""
        words: list[str] = []
        for name, value in self.arguments.items():
            if value is not None:
                values = value if isinstance(value, list) else [value]
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return tuple(words)

    def in_execution(self, execution: Execution) -> Execution:
        """``execution`` with it."""
        return replace(
            execution,
            recompute=self.granularity == FULL,
            recompute_modules=frozenset(self.modules),
            recompute_method=self.method or "uniform",
            recompute_num_layers=self.num_layers,
        )


def recompute_options(
    model: Model,
    execution: Execution,
    rates: Rates,
    permits: Callable[[LayerRecompute], bool] = lambda option: True,
) -> list[LayerRecompute]:
    """Return the kinds of recompute of a launch that trains ``model``: its own, then the others,
    fastest first: nothing; modules, one more each time, first the one that frees the most bytes for
    its time; all layers.

    Args:
        execution: of the launch.
        permits: whether Megatron and the other settings of the launch permit it. Modules that are
            permitted one by one are permitted together.
    """
    own = LayerRecompute.of(execution)
    tried = [
        *filter(permits, [NO_RECOMPUTE]),
        *_selective(model, execution, rates, permits),
        *filter(permits, [] if own.method == "uniform" else [_ALL]),
    ]
    return [own, *(option for option in tried if option != own)]


NO_RECOMPUTE = LayerRecompute()
_ALL = LayerRecompute(FULL, method="uniform", num_layers=1)


def _in_order(modules: Collection[str]) -> tuple[str, ...]:
    """Known ones as they stand in `_MODULES`, then others."""
    known = [name for name in _MODULES if name in modules]
    return (*known, *sorted(set(modules) - set(known)))


def _selective(
    model: Model,
    execution: Execution,
    rates: Rates,
    permits: Callable[[LayerRecompute], bool],
) -> Iterator[LayerRecompute]:
    stage = Stage(model.layers, depths=model.mtp_num_layers)

    def figures(option: LayerRecompute) -> tuple[float, float]:
        run = option.in_execution(execution)
        held, _ = held_of_stage(model, stage, run)
        return sum(seconds_of_layers(model, stage, run, rates).totals), held

    seconds, held = figures(NO_RECOMPUTE)
    prices: dict[str, float] = {}  # seconds of a byte
    for module in _MODULES:
        option = LayerRecompute(SELECTIVE, (module,))
        longer, less = figures(option)
        if held - less >= _LEAST * held and permits(option):
            prices[module] = (longer - seconds) / (held - less)
    modules: set[str] = set()
    for module in sorted(prices, key=prices.__getitem__):
        if not any(module in _INSIDE.get(other, ()) for other in modules):
            modules = {*modules, module} - {*_INSIDE.get(module, ())}
            yield LayerRecompute(SELECTIVE, _in_order(modules))
