"""A vision tower in front of a language model, as public configurations describe it.

The tower and its projector run inside the forward pass of the first stage. A projector joins
`merged` patches to one token of the language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_ext.base.words import shown


class TowerTraining(StrEnum):
    """Choice of the trained parts of a vision tower and its projector."""

    ALL = "trained"
    PROJECTOR = "frozen, its projector trained"
    NOTHING = "frozen"


@dataclass(frozen=True)
class Tower:
    """Dimensions of a vision tower with its projector.

    Attributes:
        patches: tokens of the tower for each sample, class tokens included.
        image: the most tokens of an image, which attend to one another.
        output_size: width of the language model's tokens.
        merged: patches that the projector joins to one token of the language model.
        projectors: number of projectors: the main one, and those that feed later layers
            (DeepStack).
        trained: its trained part.
    """

    layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    ffn_hidden_size: int
    gated_linear_unit: bool
    patches: int
    image: int
    output_size: int
    merged: int = 4
    projectors: int = 1
    trained: TowerTraining = TowerTraining.ALL

    @property
    def images(self) -> int:
        """Number of images of a sample: as many as its patches need."""
        return max(-(-self.patches // self.image), 1)

    @property
    def patches_of_image(self) -> int:
        """Number of tokens of each image in the vision tower; all images have one size."""
        return -(-self.patches // self.images)


# Default number of tokens of an image: 448 x 448 pixels in patches of 14 x 14.
IMAGE = 1024

# Sizes of a tower by the value of --vision-model-type, from examples/multimodal/config.py of
# Megatron-LM core_v0.19.0 (InternViT's 25th head is padding).
_TYPES = {
    "clip": "layers=24,hidden=1024,heads=16,ffn=4096",
    "siglip": "layers=27,hidden=1152,heads=16,ffn=4304",
    "internvit": "layers=45,hidden=3200,heads=25,ffn=12800",
    "internvit300M": "layers=24,hidden=1024,heads=16,ffn=4096",
    "radio": "layers=32,hidden=1280,heads=16,ffn=5120",
    "radio-g": "layers=40,hidden=1536,heads=24,ffn=4096,gated=true",
    "cradio-g": "layers=40,hidden=1536,heads=24,ffn=6144",
}
_NEEDED = ("layers", "hidden", "heads", "ffn")  # plain words: the hidden size, as in a job's sizes
_SIZES = (
    *_NEEDED,
    *("query_groups", "gated", "patch", "out_hidden", "deepstack_mergers", "image", "merged"),
    "tokens",
)
_TRAINED = {
    "all": TowerTraining.ALL,
    "projector": TowerTraining.PROJECTOR,
    "none": TowerTraining.NOTHING,
}
_EXAMPLE = (
    f"write one of {', '.join(_TYPES)}, or layers=27,hidden=1152,heads=16,ffn=4304; add "
    "tokens=4096 for the tower's tokens of a sample, and trained=projector or trained=none if the "
    "tower is frozen"
)


def parse_tower(text: str) -> dict[str, Any]:
    """Return the sizes of the vision tower that ``text`` names or lists, for `tower_of`.

    ``tokens``, the tower's tokens for each sample, is an entry that `tower_of` does not read.

    Raises:
        ValueError: an unknown name, or a size that is unknown or no number from 1.
    """
    first, *parts = text.split(",")
    sizes: dict[str, Any] = {}
    if "=" in first:
        parts = [first, *parts]
    elif first in _TYPES:
        parts = [*_TYPES[first].split(","), *parts]
    else:
        raise ValueError(f"--vision {shown(text)} is not known; {_EXAMPLE}")
    for part in parts:
        key, _, value = part.strip().partition("=")
        if key == "trained" and value in _TRAINED:
            sizes[key] = _TRAINED[value]
        elif key == "gated" and value in ("true", "false"):
            sizes[key] = value == "true"
        elif key in _SIZES and value.isdecimal() and 0 < int(value) < 10**6:
            sizes[key] = int(value)
        else:
            raise ValueError(f"--vision {shown(text)}: {shown(part)} is not understood; {_EXAMPLE}")
    return sizes


def tower_of(sizes: Mapping[str, Any], width: int, patches: int) -> Tower:
    """Return the vision tower of these ``sizes``, as recipes.json and `parse_tower` have them.

    Args:
        width: width of the language model.
        patches: tokens of the tower for each sample.

    Raises:
        ValueError: a size is missing.
    """
    missing = [name for name in _NEEDED if not sizes.get(name)]
    if missing:
        raise ValueError(
            f"--vision: the sizes of the vision tower lack {', '.join(missing)}; {_EXAMPLE}"
        )
    return Tower(
        layers=sizes["layers"],
        hidden_size=sizes["hidden"],  # plain words: the hidden size
        num_attention_heads=sizes["heads"],
        num_query_groups=sizes.get("query_groups") or sizes["heads"],
        ffn_hidden_size=sizes["ffn"],
        gated_linear_unit=bool(sizes.get("gated")),
        patches=patches,
        image=min(sizes.get("image") or IMAGE, patches),
        output_size=sizes.get("out_hidden") or width,
        merged=sizes.get("merged") or 4,
        projectors=1 + (sizes.get("deepstack_mergers") or 0),
        trained=sizes.get("trained") or TowerTraining.ALL,
    )
