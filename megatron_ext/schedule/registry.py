"""The families by name, and how a user's ``NAME[:key=value,...]`` becomes a schedule."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Family, Problem, Schedule, from_csv


@dataclass(frozen=True)
class FamilyEntry:
    """A registered family. ``build`` takes the problem, ``place`` the number of ranks, and each
    those options of the family that it names as keyword-only parameters."""

    name: str
    build: Callable[..., Schedule]
    place: Callable[..., Placement]
    source: str
    splits_backward: bool
    uses_costs: bool
    aliases: tuple[str, ...]


_ENTRIES: dict[str, FamilyEntry] = {}


def family(
    name: str,
    place: Callable[..., Placement],
    *,
    source: str,
    splits_backward: bool = False,
    uses_costs: bool = False,
    aliases: tuple[str, ...] = (),
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register the decorated function as the family ``name``.

    Args:
        place: the placement for so many ranks.
        source: the paper, and where in it.
        splits_backward: whether there are I and W, and not B alone.
        uses_costs: whether another cost gives another schedule.
        aliases: other names, torch.distributed.pipelining's among them.
    """

    def register(build: Callable[..., Schedule]) -> Callable[..., Schedule]:
        assert name not in _ENTRIES, f"family {name} is registered twice"
        _ENTRIES[name] = FamilyEntry(
            name, build, place, source, splits_backward, uses_costs, aliases
        )
        return build

    return register


@functools.cache
def entries() -> dict[str, FamilyEntry]:
    """All families by name, in the order of their files."""
    from megatron_ext.schedule import families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")
    return _ENTRIES


@dataclass(frozen=True)
class Choice:
    """A chosen schedule before its problem is known: a family with options, or a file."""

    spec: str
    place: Callable[[int], Placement]
    build: Family
    splits_backward: bool


def choose(spec: str) -> Choice:
    """What ``spec`` names: ``zb-h1``, ``name:key=value,...`` or the path of a CSV file.

    Raises:
        ValueError: no such family, option or file.
    """
    if spec.endswith(".csv"):
        return _from_file(Path(spec))
    name, _, options_text = spec.partition(":")
    entry = _find(name)
    options = _parse_options(entry, options_text)
    place = functools.partial(entry.place, **_accepted(entry.place, options))
    build = functools.partial(entry.build, **_accepted(entry.build, options))
    return Choice(spec, place, build, entry.splits_backward)


def with_option(spec: str, key: str, value: object) -> str:
    """``spec`` with one more option."""
    return f"{spec}{',' if ':' in spec else ':'}{key}={value}"


def _find(name: str) -> FamilyEntry:
    for entry in entries().values():
        if name == entry.name or name in entry.aliases:
            return entry
    names = ", ".join(entries())
    raise ValueError(f"there is no schedule {name!r}; known are {names}, or a .csv file")


def _options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that ``function`` takes."""
    return {key: value for key, value in options.items() if key in _options_of(function)}


_BOOLEANS = {"true": True, "false": False}  # bool("false") is True


def _parse_options(entry: FamilyEntry, text: str) -> dict[str, Any]:
    """A family's options are the keyword-only parameters of its function and of its placement's,
    converted to their default's type."""
    parameters = _options_of(entry.place) | _options_of(entry.build)
    options = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in parameters:
            known = ", ".join(parameters) or "none"
            raise ValueError(f"schedule {entry.name} has no option {key!r}; it has: {known}")
        kind = type(parameters[key].default)
        try:
            options[key] = _BOOLEANS[value] if kind is bool else kind(value)
        except (KeyError, ValueError):
            wanted = " or ".join(_BOOLEANS) if kind is bool else kind.__name__
            raise ValueError(
                f"schedule {entry.name}: {key} must be {wanted}, not {value!r}"
            ) from None
    return options


def _from_file(path: Path) -> Choice:
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"schedule file {path} cannot be read: {error}") from None
    schedule = from_csv(text, path.name)

    def place(ranks: int) -> Placement:
        if ranks != len(schedule.rows):
            raise ValueError(
                f"schedule file {path} has {len(schedule.rows)} rows, the pipeline has {ranks} "
                f"ranks: one row per rank is needed"
            )
        return schedule.placement

    def build(problem: Problem) -> Schedule:
        return schedule

    splits = any(a.kind is Kind.BACKWARD_WEIGHT for row in schedule.rows for a in row)
    return Choice(str(path), place, build, splits)
