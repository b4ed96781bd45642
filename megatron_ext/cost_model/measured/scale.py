"""Ratios of measured to estimated costs, for each component of a stage.

A component is a layer of one type, named by that type's symbol in `Model`, or another part of a
stage, such as the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.schedule.costs import TowerCosts

DEPTH = "depth"  # name for a layer of multi-token prediction with its projection
EMBEDDING = "embedding"
OUTPUT_LAYER = "output layer"  # name of one run of the output layer, with the loss
PASS = "pass"  # name for the time of a pass that belongs to none of its layers


@dataclass(frozen=True)
class Scale:
    """Ratios of measured to estimated costs of a model's component.

    There is one ratio each for the seconds of F, I and W, and for the bytes held from F to I and
    from I to W.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    activation: float = 1.0
    weight_inputs: float = 1.0


NOT_SCALED = Scale()


@dataclass(frozen=True)
class Links:
    """Measured bytes per second of messages between pipeline neighbours, and number of ranks on a
    node.

    A field is None if no neighbours were measured for it.
    """

    within: float | None = None  # scale of messages within a node; None if not measured
    between: float | None = None  # scale of messages between nodes; None if not measured
    ranks_of_node: int | None = None


@dataclass(frozen=True)
class Measured:
    """Measurements of a model on a machine, to which estimates are scaled.

    Attributes:
        scales: ratios for each component that was measured.
        others: ratios for components that were not measured: those of all layers together.
        links: measured links to pipeline neighbours.
        tower: costs of an encoder on the first stage; None: there was none.
        origin: time and place of the measurement, for people to read.
    """

    scales: tuple[tuple[str, Scale], ...]
    others: Scale
    links: Links = Links()
    tower: TowerCosts | None = None
    origin: str = "measured"

    def of(self, component: str) -> Scale:
        return dict(self.scales).get(component, self.others)
