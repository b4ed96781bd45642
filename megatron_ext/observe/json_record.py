"""Checked access to an object of a JSON file that others may have written.

Files of traces, races and costs may come from another version, another machine, or an editor. Each
access names the file, the key and the value that was expected, so that a damaged file is one line
and no traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MOST = 1e18  # largest number in a record; NaN and infinity are not below it


@dataclass(frozen=True)
class Record:
    """Object of a JSON file, with checked access to its values.

    Each method returns the value of a key, and raises ValueError if it is missing or of another
    type. Errors say ``where`` the object stands.
    """

    data: Mapping[str, Any]
    where: str

    def number(self, key: str) -> float:
        return float(self._value(key, _is_number, "a finite number"))

    def count(self, key: str) -> int:
        return int(self._value(key, _is_count, "a whole number from 0"))

    def text(self, key: str) -> str:
        return str(self._value(key, lambda value: isinstance(value, str), "a text"))

    def shares(self, key: str) -> tuple[float, ...]:
        return tuple(map(float, self._value(key, _are_shares, "a list of numbers from 0 to 1")))

    def amounts(self, key: str) -> tuple[float, ...]:
        return tuple(map(float, self._value(key, _are_amounts, "a list of numbers from 0")))

    def triple(self, key: str) -> tuple[float, float, float]:
        a, b, c = self._value(key, _is_triple, "a list of three numbers from 0")
        return float(a), float(b), float(c)

    def triples(self, key: str) -> dict[str, tuple[float, float, float]]:
        found = self._value(key, _has_triples, "an object of lists of three numbers from 0")
        return {name: (float(a), float(b), float(c)) for name, (a, b, c) in found.items()}

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self._value(key, _are_texts, "a list of texts"))

    def texts_by_name(self, key: str) -> dict[str, str]:
        found = self._value(key, _has_texts, "an object of texts")
        return dict(found)

    def objects(self, key: str) -> list[Record]:
        found = self._value(key, _are_objects, "a list of objects")
        return [Record(one, f"{self.where}, {key} {n}") for n, one in enumerate(found)]

    def texts_of_rows(self, key: str) -> tuple[tuple[str, ...], ...]:
        return tuple(map(tuple, self._value(key, _are_rows, "a list of lists of texts")))

    def truth(self, key: str) -> bool:
        return bool(self._value(key, lambda value: isinstance(value, bool), "true or false"))

    def _value(self, key: str, is_right: Callable[[Any], bool], expected: str) -> Any:
        value = self.data.get(key)
        if not is_right(value):
            is_now = f"is {value!r:.60}" if key in self.data else "is missing"
            raise ValueError(f"{self.where}: {key} {is_now}; {expected} is expected")
        return value


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) < _MOST


def _are_shares(value: Any) -> bool:
    return _are_amounts(value) and max(value, default=0) <= 1


def _are_amounts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_number(part) and part >= 0 for part in value)


def _is_triple(value: Any) -> bool:
    return _are_amounts(value) and len(value) == 3


def _has_triples(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_triple, value.values()))


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and all(map(_are_texts, value))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _has_texts(value: Any) -> bool:
    return isinstance(value, dict) and _are_texts(list(value.values()))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST
