"""The vision tower of a launch, from what the user says of it and from flags of Megatron's example.

Megatron's arguments describe the language model alone, and a tower makes the first stage slow. Its
sizes come from the user, or from the flags that examples/multimodal adds to Megatron's
(multimodal_args.py, core_v0.19.0).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.cost_model.tower import parse_tower, tower_of
from megatron_ext.launch.command.arguments_file import VISION


def take_vision(values: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings of a vision tower from ``values``, and return them.

    They are no arguments of Megatron's.
    """
    return {name: values.pop(name) for name in VISION if name in values}


def vision_of_launch(
    args: Any,
    unknown: Sequence[str],
    given: Mapping[str, Any],
    text: str | None,
) -> dict[str, Any]:
    """Return the settings of the launch's vision tower, by names of `VISION`; empty without one.

    Args:
        args: arguments parsed by Megatron, which knows the sizes of images and patches.
        unknown: words of the launch command that Megatron's own parser does not know.
        given: settings of a tower in a file of arguments.
        text: value of ``--vision``; None if not given.

    Raises:
        ValueError: ``text`` is not understood, or a size is missing.
    """
    settings = _of_example(args, unknown) | dict(given)
    if text is not None:
        tower = settings["vision"] = parse_tower(text)
        if "tokens" in tower:
            settings["vision_tokens"] = tower.pop("tokens")
    if isinstance(settings.get("vision"), Mapping):
        tower_of(settings["vision"], args.hidden_size or 1, 1)
    return settings


def _of_example(args: Any, unknown: Sequence[str]) -> dict[str, Any]:
    """Return vision settings of a launch of Megatron's examples/multimodal; else none."""
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
