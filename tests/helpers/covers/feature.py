"""A feature: a setting that is switched on, with the class of its value.

A test has to show each class. Values that no schedule can tell apart are one class: context
parallelism over 2 ranks stands for that over 32. A setting that is off, or that no test needs to
show, has no feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Value = Any  # the value of a setting: a bool, number, text or list, as in JSON


@dataclass(frozen=True, order=True)
class Feature:
    """A setting and a class of its values. ``text`` names the class; it is empty if the setting is
    a switch."""

    setting: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.setting} {self.text}".strip()


Classes = Callable[[Value], tuple[str, ...]]


@dataclass(frozen=True)
class Setting:
    """A setting of Megatron, or of the code that builds its model and optimizer.

    Attributes:
        classes: returns the classes of a value, or () if the value means off. Raises ValueError for
            an unknown value.
        why: meaning of a class, or the reason why the setting needs no test.
    """

    name: str
    classes: Classes
    why: str = ""

    def features(self, value: Value) -> tuple[Feature, ...]:
        """Return the features that ``value`` switches on.

        Raises:
            ValueError: the setting has no such value.
        """
        try:
            return tuple(Feature(self.name, text) for text in self.classes(value))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}={value!r} is not known: {error}") from None


def switch(value: Value) -> tuple[str, ...]:
    """Return the class of a switch: on or off."""
    if value is None or value is False:
        return ()
    if value is True:
        return ("",)
    raise ValueError("the value must be True or False")


def number(value: Value) -> tuple[str, ...]:
    """Return no class for a size or a factor, which needs no test."""
    if value is None or isinstance(value, int | float):
        return ()
    raise ValueError("the value must be a number")


def anything(value: Value) -> tuple[str, ...]:
    """Return no class: no value needs a test."""
    return ()


def given(value: Value) -> tuple[str, ...]:
    """Return one class for any value, and none if the setting is off."""
    return () if value is None or value is False else ("",)


def at_least(least: int) -> Classes:
    """Return the classes of a number: off below ``least``, and one class from there on."""

    def classes(value: Value) -> tuple[str, ...]:
        if value is None:
            return ()
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("the value must be a number")
        return (f">= {least}",) if value >= least else ()

    return classes


def one_of(*values: str, off: Iterable[str] = (), same: Mapping[str, str] | None = None) -> Classes:
    """Return the classes of a setting whose value is one of the names ``values``. Names in ``off``
    need no test, and ``same`` maps other names to names in ``values``."""
    others = dict(same or {})

    def classes(value: Value) -> tuple[str, ...]:
        if value is None or value is False:
            return ()
        value = others.get(str(value), str(value))
        if value in off:
            return ()
        if value in values:
            return (value,)
        raise ValueError(f"the value must be one of {', '.join((*values, *off))}")

    return classes


def each_of(*names: str) -> Classes:
    """Return the classes of a list of ``names``, each of which is its own class."""

    def classes(value: Value) -> tuple[str, ...]:
        if value is None:
            return ()
        listed = [value] if isinstance(value, str) else [str(name) for name in value]
        unknown = [name for name in listed if name not in names]
        if unknown:
            raise ValueError(
                f"unknown values {', '.join(unknown)}: write some of {', '.join(names)}"
            )
        return tuple(dict.fromkeys(listed))

    return classes
