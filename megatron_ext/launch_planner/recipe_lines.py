"""Lines of Python that change a Megatron-Bridge config to what a plan recommends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_ext.config import PREFIX
from megatron_ext.launch_command import line as launch_line
from megatron_ext.launch_planner.variants import stock_schedule
from megatron_ext.planner.verdict import Written
from megatron_ext.written_settings import given_in


def lines_with(
    config_fields: Mapping[str, str], written: Written, arguments: Sequence[str]
) -> Iterator[str]:
    """Yield the lines for what is ``written``, to be pasted between a recipe and ``pretrain``.

    Args:
        config_fields: the fields of the recipe's config by the names of Megatron's arguments.
        arguments: the launch's, with what is ``written``.
    """
    options = launch_line.parser()._option_string_actions
    changed = launch_line.parse(written.words).args
    values: dict[str, Any] = {}
    for flag in written.dropped:
        values[options[flag].dest] = False if options[flag].nargs == 0 else None
    for word in written.words:
        if (option := options.get(word.split("=")[0])) is not None:
            values[option.dest] = getattr(changed, option.dest)
    settings = given_in(arguments)
    for name, value in values.items():
        if name.removeprefix(PREFIX) not in settings:
            yield f"config.{config_fields.get(name, f'model.{name}')} = {_literal(value)}"
    if "schedule" in settings or written.arranging:
        stock = {"schedule": stock_schedule(launch_line.parse(arguments).args)}
        given = {**stock, **settings}.items()
        keywords = ", ".join(f"{name}={_literal(value)}" for name, value in given)
        yield f"megatron_ext.bridge.use(config, {keywords})"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
