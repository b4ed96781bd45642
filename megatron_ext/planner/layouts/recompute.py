"""Megatron's own recompute of layers (``--recompute-*``): a launch's settings and alternatives.

Which layers a rank can afford to store depends on the layout, so both are chosen together. The
alternatives are those that Megatron's flags can express and that differ in the model's estimated
costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_ext.base.words import argument_flag
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
# Modules that contain other modules, which are recomputed together with them.
_INSIDE = {"moe": ("moe_act", "shared_experts")}
# Least share of the stored activation bytes that the recompute of a module must free; other modules
# are ignored.
_LEAST_FREED = 0.01


@dataclass(frozen=True)
class LayerRecompute:
    """Megatron's settings of recompute; the attribute ``x`` is its argument ``recompute_x``.

    Attributes:
        granularity: ``full``, ``selective``, or "" for no recompute.
        modules: recomputed modules, with ``selective``.
        method, num_layers: which layers are recomputed, with ``full``.
    """

    granularity: str = ""
    modules: tuple[str, ...] = ()
    method: str = ""
    num_layers: int = 0

    @classmethod
    def of(cls, execution: Execution) -> LayerRecompute:
        """Return Megatron's recompute settings in the training that ``execution`` describes."""
        if execution.recompute:
            method, number = execution.recompute_method, execution.recompute_num_layers
            return cls(FULL, method=method, num_layers=number)
        modules = execution.recompute_modules
        return cls(SELECTIVE, _in_order(modules)) if modules else NO_RECOMPUTE

    def __str__(self) -> str:
        """Return a short name of the recompute settings for tables, such as ``full, 2 a stage``."""
        if self.granularity == SELECTIVE:
            return " ".join(self.modules)
        if self.method == "block":
            return f"full, {self.num_layers} a stage"
        return self.granularity or "none"

    @property
    def arguments(self) -> dict[str, Any]:
        """Values of Megatron's arguments for recompute, by their names."""
        return {
            "recompute_granularity": self.granularity or None,
            "recompute_modules": list(self.modules) or None,
            "recompute_method": self.method or None,
            "recompute_num_layers": self.num_layers or None,
        }

    @property
    def words(self) -> tuple[str, ...]:
        """Flags of a launch command that request these recompute settings."""
        words: list[str] = []
        for name, value in self.arguments.items():
            if value is not None:
                values = value if isinstance(value, list) else [value]
                words += [argument_flag(name), *map(str, values)]
        return tuple(words)

    def in_execution(self, execution: Execution) -> Execution:
        """Return ``execution`` with these recompute settings instead of its own."""
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
    """Return the recompute settings to compare for a launch that trains ``model``.

    The launch's own settings come first. The others follow, fastest first:

    1. no recompute;
    2. selective recompute of one module, of two, and so on. The first module is the one whose
       recompute takes the fewest seconds for each byte that it frees;
    3. full recompute of all layers.

    Args:
        execution: how the launch runs the model.
        rates: speeds of the GPU, for the seconds of a recompute.
        permits: returns whether Megatron and the other settings of the launch permit some settings.
            It is called with single modules only: modules are assumed to be permitted together
            if each of them is permitted.
    """
    given = LayerRecompute.of(execution)
    # With uniform recompute a launch already recomputes all layers, whatever --recompute-num-layers
    # is.
    of_all_layers = [] if given.method == "uniform" else [_ALL]
    tried = [
        *filter(permits, [NO_RECOMPUTE]),
        *_selective(model, execution, rates, permits),
        *filter(permits, of_all_layers),
    ]
    return [given, *(option for option in tried if option != given)]


NO_RECOMPUTE = LayerRecompute()
_ALL = LayerRecompute(FULL, method="uniform", num_layers=1)


def _in_order(modules: Collection[str]) -> tuple[str, ...]:
    """Return names of recomputed ``modules`` in the order of `_MODULES`, unknown names last."""
    known = [name for name in _MODULES if name in modules]
    return (*known, *sorted(set(modules) - set(known)))


def _selective(
    model: Model,
    execution: Execution,
    rates: Rates,
    permits: Callable[[LayerRecompute], bool],
) -> Iterator[LayerRecompute]:
    """Yield Megatron's settings for selective recompute of one module, of two, and so on.

    Their order is that of `recompute_options`.
    """
    stage = Stage(model.layers, depths=model.mtp_num_layers)

    def figures(option: LayerRecompute) -> tuple[float, float]:
        """Return seconds and stored bytes of the layers under the recompute setting ``option``.

        Bytes are those stored from the forward to the backward pass.
        """
        run = option.in_execution(execution)
        held, _ = held_of_stage(model, stage, run)
        return sum(seconds_of_layers(model, stage, run, rates).totals), held

    seconds, stored = figures(NO_RECOMPUTE)
    # Additional seconds of a module's recompute for each byte that it frees.
    prices: dict[str, float] = {}
    for module in _MODULES:
        option = LayerRecompute(SELECTIVE, (module,))
        longer, still_stored = figures(option)
        freed = stored - still_stored
        if freed >= _LEAST_FREED * stored and permits(option):
            prices[module] = (longer - seconds) / freed
    modules: set[str] = set()
    for module in sorted(prices, key=prices.__getitem__):
        if not any(module in _INSIDE.get(other, ()) for other in modules):
            modules = {*modules, module} - {*_INSIDE.get(module, ())}
            yield LayerRecompute(SELECTIVE, _in_order(modules))
