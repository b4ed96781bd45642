"""Options of a schedule in a user's text form: ``key=value,...``.

The options of a family are the keyword-only parameters of its function, with their types and
defaults. So a new option needs no second declaration, and an error can list the options that there
are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_ext.base.words import meant_by, shown

Parameters = Mapping[str, inspect.Parameter]

# The words for booleans in a spec, since bool("false") is True.
_BOOLEANS = {"true": True, "false": False}
_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the schedule options that a family's function takes: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return those of a schedule's ``options`` that ``function`` takes as keyword-only
    parameters."""
    return {key: value for key, value in options.items() if key in parameters_of(function)}


def parse_options(name: str, parameters: Parameters, text: str) -> dict[str, Any]:
    """Return the schedule options in ``text``, such as ``key=value,...``, with values converted.

    A value gets the type of the option's default. ``name`` is the schedule's.

    Raises:
        ValueError: there is no such option, or its value is not understood.
    """
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in parameters:
            known = f"its options are {', '.join(parameters)}" if parameters else "it has none"
            raise ValueError(
                f"schedule {name} has no option {shown(key)!r}; {perhaps(key, parameters, known)}"
            )
        if key in options:
            raise ValueError(
                f"schedule {name}: {key} is given twice in {shown(text)!r}; write {key} once"
            )
        kind = type(parameters[key].default)
        try:
            options[key] = _BOOLEANS[value] if kind is bool else kind(value)
        except (KeyError, ValueError):
            expected = _TYPES[kind]
            raise ValueError(
                f"schedule {name}: {key} must be {expected}, not {shown(value)!r}"
            ) from None
    return options


def perhaps(name: str, known: Iterable[str], all_known: str) -> str:
    """Return the end of an error about an unknown ``name``: similar names, or all known ones."""
    meant = meant_by(name, known)
    if not meant:
        return all_known
    return f"did you mean {' or '.join(meant)}? {all_known[0].upper()}{all_known[1:]}"
