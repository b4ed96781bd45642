"""Entries of a costs file besides costs per stage: costs per layer type, reserved bytes, and rates.

Costs per stage serve one layout. Costs of each type of layer, and the rates of the GPU and its
links, serve any other layout of the same model, so a training writes them too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_ext.base.words import shown
from megatron_ext.cost_model.measured.layer_costs import (
    FIGURES,
    LayerCosts,
    MeasuredFigures,
    alike_remark,
)
from megatron_ext.cost_model.measured.machine_factors import read_factors
from megatron_ext.cost_model.measured.scale import Links, Measured
from megatron_ext.cost_model.measured_costs import Machine
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.rates import Rates
from megatron_ext.schedule.costs import TowerCosts
from megatron_ext.schedule.costs_text import MOST, read_costs_file, rounded
from megatron_ext.schedule.kinds import Held

_LAYERS, _LINKS, _RESERVED, _MACHINE = "layers", "links", "reserved", "machine"
_WITHIN, _BETWEEN, _OF_NODE = "within a node", "between nodes", "ranks of a node"
_RATES = tuple(field.name for field in fields(Rates) if field.name not in ("measured", "factors"))


@dataclass(frozen=True)
class MeasuredFile:
    """Measurements of layers in a costs file, to which estimates are scaled.

    Attributes:
        rates: rates that were assumed at the measurement, together with the measurement.
        alike: as in `LayerCosts`.
        stages: how many layers each stage had.
        reserved: bytes that the allocator had reserved beyond the most that was allocated; None:
            not known.
    """

    rates: Rates
    alike: tuple[tuple[str, ...], ...]
    stages: tuple[int, ...]
    reserved: float | None = None

    def remarks(self, model: Model) -> Iterator[str]:
        """Yield remarks for users about an estimate of ``model`` that is scaled to these
        measurements."""
        measured = self.rates.measured
        assert measured is not None
        yield f"costs are {measured.origin}"
        if self.rates.factors is not None:
            yield self.rates.factors.remark()
        yield from map(alike_remark, self.alike)
        if measured.tower is not None and model.tower is None:
            yield (
                "the encoder on the first stage counts as measured, and its weights, gradients and "
                "optimizer states not at all: name it with --vision"
            )
        types = dict.fromkeys(model.layers)
        missing = [layer for layer in types if layer not in dict(measured.scales)]
        if missing:
            yield f"not measured, and scaled as all layers together: {', '.join(missing)}"


def as_data(
    layers: LayerCosts | None, machine: Machine, forwards: Sequence[float] = ()
) -> dict[str, Any]:
    """Return measurements of layers and links as entries of a costs file, for `load_measured`.

    Args:
        layers: costs of each type of layer; None if they are not known.
        machine: measured links and memory.
        forwards: seconds of the forward passes of the first stage, by microbatch of one step.
    """
    data: dict[str, Any] = {}
    if machine.links:
        names = {False: _WITHIN, True: _BETWEEN}
        data[_LINKS] = {
            **{names[is_far]: rounded([seconds])[0] for is_far, seconds in machine.links.items()},
            _OF_NODE: machine.ranks_of_node,
        }
    if machine.reserved is not None:
        data[_RESERVED] = round(machine.reserved)
    if layers is not None:
        rates = {name: getattr(layers.rates, name) for name in _RATES}
        data[_LAYERS] = {
            "measured": _written(layers.measured),
            "estimated": _written(layers.estimated),
            "rates": {name: None if rate == math.inf else rate for name, rate in rates.items()},
            "alike": [list(group) for group in layers.alike],
            "stages": list(layers.stages),
        }
        if layers.rates.factors is not None:
            data[_MACHINE] = layers.rates.factors.as_data()
        if layers.tower is not None:
            data[_LAYERS]["tower"] = _tower_as_data(layers.tower, forwards)
    return data


def _tower_as_data(tower: TowerCosts, forwards: Sequence[float]) -> dict[str, Any]:
    """Return the entry of an encoder in a costs file.

    Its images make microbatches differ, so the forward seconds of each microbatch are written.
    """
    of_layers = statistics.median(forwards) - tower.seconds[0] if forwards else 0.0
    return {
        "seconds": rounded(tower.seconds),
        "activation": round(tower.activation),
        "forward by microbatch": rounded([max(f - of_layers, 0.0) for f in forwards]),
    }


def _written(components: Mapping[str, MeasuredFigures]) -> dict[str, dict[str, float]]:
    return {
        name: {_key(figure): rounded([value])[0] for figure, value in figures.items()}
        for name, figures in components.items()
        if figures
    }


def _key(figure: Any) -> str:
    return figure.value if isinstance(figure, Held) else figure.value.lower()


def measured_reserve(path: Path | None, gpu: str | None = None) -> float | None:
    """Return the bytes that an allocator reserves beyond its allocations, as a costs file says.

    None: not measured. Arguments and errors are those of `load_measured`.
    """
    measured = None if path is None else load_measured(path, gpu)
    return None if measured is None else measured.reserved


def load_measured(path: Path, gpu: str | None = None) -> MeasuredFile | None:
    """Return the costs of layer types in the costs file ``path``; None if it has none.

    Args:
        gpu: the GPU to plan for, of `GPUS` or by its driver's name; None: not known.

    Raises:
        ValueError: ``path`` is no costs file, its entries for layers are not understood, or it was
            measured on another GPU.
    """
    data = read_costs_file(path)
    if _LAYERS not in data:
        return None
    key = _LAYERS
    try:
        layers = _layers(data[_LAYERS])
        scales, others = layers.scales(), layers.of_others
        key = _LINKS
        links = _links(data)
        key = _RESERVED
        reserved = None if data.get(_RESERVED) is None else _number(data[_RESERVED])
        key = _MACHINE
        factors = read_factors(data[_MACHINE]) if _MACHINE in data else None
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"costs file {path}: the entry {key} is not as --pipeline-costs profile writes it "
            f"({shown(repr(error), 200)}): measure again, or delete the entry"
        ) from None
    if factors is not None and gpu is not None and not factors.is_of(gpu):
        raise ValueError(
            f"costs file {path} was measured on {factors.gpu}, and the GPU to plan for is {gpu}: "
            f"measure there with --pipeline-costs profile, or omit the file"
        )
    origin = f"{path}, by layer type ({shown(data.get('origin', 'given'), 300)})"
    measured = Measured(
        scales=scales, others=others, links=links, tower=layers.tower, origin=origin
    )
    rates = replace(layers.rates, measured=measured, factors=factors)
    return MeasuredFile(rates, layers.alike, layers.stages, reserved)


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < MOST:
        raise ValueError(f"{value!r} is not a number of at least 0")
    return float(value)


def _layers(data: Mapping[str, Any]) -> LayerCosts:
    given = {name: data["rates"][name] for name in _RATES if name in data["rates"]}
    rates: dict[str, Any] = {
        name: math.inf if rate is None else _number(rate) for name, rate in given.items()
    }
    if "domain" in rates:
        rates["domain"] = int(rates["domain"])
    return LayerCosts(
        measured={name: _read(figures) for name, figures in data["measured"].items()},
        estimated={name: _read(figures) for name, figures in data["estimated"].items()},
        rates=Rates(**rates),
        alike=tuple(map(tuple, data["alike"])),
        stages=tuple(map(int, data["stages"])),
        tower=_tower(data["tower"]) if "tower" in data else None,
    )


def _tower(data: Mapping[str, Any]) -> TowerCosts:
    forward, backward, weights = map(_number, data["seconds"])
    return TowerCosts((forward, backward, weights), _number(data["activation"]))


def _read(figures: Mapping[str, float]) -> MeasuredFigures:
    known = {_key(figure): figure for figure in FIGURES}
    return {known[key]: _number(value) for key, value in figures.items()}


def _links(data: Mapping[str, Any]) -> Links:
    size = _number(data.get("bytes", {}).get(Held.MESSAGE.value, 0))
    links = {name: _number(figure) for name, figure in data.get(_LINKS, {}).items()}
    within, between = (
        size / links[name] if size and links.get(name) else None for name in (_WITHIN, _BETWEEN)
    )
    ranks = int(links[_OF_NODE]) if _OF_NODE in links else None
    return Links(within, between, ranks)
