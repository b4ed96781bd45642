"""Changes of a Megatron-Bridge config to what a plan recommends, as lines of Python too.

A recipe of Bridge has a config in place of flags. What a plan recommends as flags is therefore
turned into assignments to the config's fields and one call of `megatron_ext.bridge.use`, and `use`
checks them here as it will when the lines run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron_ext.adapter.layout_arguments import CHUNKS
from megatron_ext.bridge import check
from megatron_ext.config import PREFIX, PipelineConfig
from megatron_ext.launch.command import megatron_arguments
from megatron_ext.launch.command.launch_words import BridgeRecipe
from megatron_ext.launch.planner.stage_arguments import stock_schedule
from megatron_ext.planner.verdict import Written
from megatron_ext.written_settings import Given, given_in


class RecipeChanges:
    """Changes to a Megatron-Bridge config that do what the flags ``written`` do for a command.

    Args:
        arguments: the launch's arguments, with the changes ``written``.

    Attributes:
        fields: values of the config's fields by their names, such as ``model.num_layers``.
        settings: settings for `megatron_ext.bridge.use`; empty without a call of `use`.
    """

    def __init__(self, recipe: BridgeRecipe, written: Written, arguments: Sequence[str]) -> None:
        self._recipe = recipe
        options = megatron_arguments.parser()._option_string_actions
        changed = megatron_arguments.parse_arguments(written.words).args
        args = megatron_arguments.parse_arguments(arguments).args
        given = given_in(arguments)
        self.settings: Given = {}
        if "schedule" in given or written.arranging:
            self.settings = {"schedule": stock_schedule(args), **given}
        values: dict[str, Any] = {}
        for flag in written.dropped:
            values[options[flag].dest] = False if options[flag].nargs == 0 else None
        for word in written.words:
            if (option := options.get(word.split("=")[0])) is not None:
                values[option.dest] = getattr(changed, option.dest)
        # The recipe itself may set virtual stages, which the schedule's own replace.
        if not self.settings and getattr(args, CHUNKS) is None:
            values.setdefault(CHUNKS, None)
        self.fields = {
            recipe.fields.get(name, f"model.{name}"): value
            for name, value in values.items()
            if name.removeprefix(PREFIX) not in given
        }

    def check(self) -> None:
        """Raise ValueError if `megatron_ext.bridge.use` would refuse the changed config."""
        if self.settings:
            check(self._recipe.config, PipelineConfig.parse(**self.settings), self.fields)

    def text(self) -> str:
        """Return the changes as lines of Python, to paste between a recipe and ``pretrain``."""
        lines = [f"config.{name} = {_literal(value)}" for name, value in self.fields.items()]
        if self.settings:
            keywords = ", ".join(
                f"{name}={_literal(value)}" for name, value in self.settings.items()
            )
            lines.append(f"megatron_ext.bridge.use(config, {keywords})")
        return "\n".join(lines)


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
