"""The vision tower of a launch, from what the user says of it and from flags of Megatron's example.

examples/multimodal adds flags of its own to Megatron's (multimodal_args.py, core_v0.19.0).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.cost_model.tower import parse_tower, tower_of

SETTINGS = (
    *("vision", "vision_tokens"),
    *("freeze_vision_model", "freeze_vision_projection", "freeze_language_model"),
)


def take_vision(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of a tower from ``values``, which are no arguments of Megatron's, and
    return them."""
    return {name: values.pop(name) for name in SETTINGS if name in values}


def vision_of_launch(
    args: Any,
    unknown: Sequence[str],
    given: Mapping[str, Any],
    text: str | None,
    tokens: int | None,
) -> dict[str, Any]:
    """Return the settings of the launch's tower, by the names of `SETTINGS`; empty without one.

    Args:
        args: parsed by Megatron, which knows the size of images and patches.
        unknown: words of the launch command that Megatron's own parser does not know.
        given: settings from a file of arguments.
        text: value of ``--vision``; None: not given.
        tokens: value of ``--vision-tokens``: tokens of the tower for each sample.

    Raises:
        ValueError: ``text`` is not understood, a size is missing, or there are tokens and no tower.
    """
    settings = _of_example(args, unknown) | dict(given)
    if text is not None:
        settings["vision"] = parse_tower(text)
    if tokens is not None:
        if "vision" not in settings:
            raise ValueError(
                "--vision-tokens says how many tokens a vision tower has for each sample: name the "
                "tower with --vision"
            )
        settings["vision_tokens"] = tokens
    if isinstance(settings.get("vision"), Mapping):
        tower_of(settings["vision"], args.hidden_size or 1, 1)
    return settings


def _of_example(args: Any, unknown: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a launch of examples/multimodal; empty for other launches."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--vision-model-type")
    parser.add_argument("--max-num-tiles", type=int, default=1)
    for name in ("freeze-LM", "freeze-ViT", "disable-vision-class-token", "use-thumbnail"):
        parser.add_argument(f"--{name}", action="store_true")
    options, _ = parser.parse_known_args(list(unknown))
    if options.vision_model_type is None:
        return {}
    patches = (args.img_h // args.patch_dim) * (args.img_w // args.patch_dim)
    patches += not options.disable_vision_class_token
    tiles = options.max_num_tiles + (options.use_thumbnail and options.max_num_tiles > 1)
    return {
        "vision": parse_tower(options.vision_model_type) | {"image": patches, "merged": 1},
        "vision_tokens": tiles * patches,
        "freeze_vision_model": options.freeze_ViT,
        "freeze_language_model": options.freeze_LM,
    }
