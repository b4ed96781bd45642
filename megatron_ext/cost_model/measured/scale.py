"""How much more what was measured is than what is estimated, component by component of a stage.

A component is a layer of a type, in the symbols of `Model`, or what is beside layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.schedule.costs import TowerCosts

DEPTH = "depth"  # of multi-token prediction: its projection and its layer
EMBEDDING = "embedding"
OUTPUT_LAYER = "output layer"  # one run of it, with the loss
PASS = "pass"  # what a pass takes by itself


@dataclass(frozen=True)
class Scale:
    """What was measured over what is estimated: of the seconds of F, I and W, and of the bytes that
    are held from F to I and from I to W."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    activation: float = 1.0
    weight_inputs: float = 1.0


NOT_SCALED = Scale()


@dataclass(frozen=True)
class Links:
    """Bytes per second of messages between pipeline neighbours, and how many ranks a node had; None
    where there was no such pair."""

    within: float | None = None  # a node
    between: float | None = None  # nodes
    ranks_of_node: int | None = None


@dataclass(frozen=True)
class Measured:
    """What of a machine's rates was measured with a model.

    Attributes:
        scales: of each component that was there.
        others: of one that was not: that of all of them together.
        links: to pipeline neighbours.
        tower: of an encoder on the first stage; None: there was none.
        origin: when and on what, for people to read.
    """

    scales: tuple[tuple[str, Scale], ...]
    others: Scale
    links: Links = Links()
    tower: TowerCosts | None = None
    origin: str = "measured"

    def of(self, component: str) -> Scale:
        return dict(self.scales).get(component, self.others)
