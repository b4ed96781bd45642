"""Conversion of published recipes (nested configs, values as text, layouts) to one flat form.

Megatron-Bridge's recipes are Python. What is published of them is a dump of their configs: one
keeps the configs nested where another has dotted names, and values are text or JSON.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Value = Any  # value of a setting: a bool, number, text or list, as in JSON
Settings = Mapping[str, Value]

_LONGEST = 10_000  # largest number of elements of a list written as a product, such as [0] * 3

_WORDS = {"true": True, "false": False, "null": None, "none": None}
# Symbols of Megatron's layer types in the text of a layout.
_SYMBOLS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_PARTS = {"models", "recipes"}  # keys of the two parts of a file
_NAMES = ("name", "recipe")  # keys that may hold a recipe's name in a list of recipes
_AROUND = ("cfg", "config", "recipe")  # names of variables that hold a recipe's config


def read_recipes(path: Path) -> dict[str, Any]:
    """Return the recipes of the JSON file ``path`` by name, each in the form that it has there.

    The file is a mapping of names to settings, or a list of settings that each have a name. Or it
    is a mapping with one of these as ``recipes``, and with the recipes' models as ``models``.

    Raises:
        ValueError: the file cannot be read, or has another form.
    """
    try:
        recipes = json.loads(path.read_text(), object_pairs_hook=_without_repetition)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if isinstance(recipes, dict) and "recipes" in recipes and set(recipes) <= _PARTS:
        recipes = recipes["recipes"]
    if isinstance(recipes, list):
        return _without_repetition([_with_name(path, recipe) for recipe in recipes])
    if not isinstance(recipes, dict):
        raise ValueError(f"{path} is neither a mapping of recipes by name nor a list of them")
    return recipes


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the setting {key} occurs twice in a recipe")
        found[key] = value
    return found


def _with_name(path: Path, recipe: Any) -> tuple[str, Any]:
    given = recipe if isinstance(recipe, dict) else {}
    name = next((given[key] for key in _NAMES if isinstance(given.get(key), str)), None)
    if name is None:
        raise ValueError(
            f"{path}: an entry in the list of recipes has no name: {str(recipe)[:60]!r}"
        )
    settings = {key: value for key, value in given.items() if key not in _NAMES}
    return name, settings.get("settings", settings)


def flat(recipe: Any) -> dict[str, Value]:
    """Return the settings of ``recipe`` by dotted names, with plain values.

    Settings that are None are omitted.

    Raises:
        ValueError: ``recipe`` is no mapping, or a value is not understood.
    """
    if not isinstance(recipe, Mapping):
        raise ValueError(
            f"the settings of a recipe must be a mapping, but are {str(recipe)[:60]!r}"
        )
    settings: dict[str, Value] = {}
    for key, value in recipe.items():
        words = str(key).lstrip("+-").replace("-", "_").split(".")
        name = ".".join(words[1:] if words[0] in _AROUND else words)
        made = plain(value)
        if isinstance(made, Mapping) and name.rpartition(".")[2] != "dataset_kwargs":
            inner = {f"{name}.{inside}": within for inside, within in flat(made).items()}
        else:
            inner = {} if made is None else {name: made}
        for dotted, given in inner.items():
            if settings.get(dotted, given) != given:
                raise ValueError(
                    f"the setting {dotted} is given twice, as {settings[dotted]!r} and as {given!r}"
                )
            settings[dotted] = given
    return settings


def plain(value: Value) -> Value:
    """Return ``value`` as JSON would have it.

    The text of a Python literal becomes its value: ``"[512, 0]"`` becomes ``[512, 0]``. Other text
    stays as it is.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if not isinstance(value, str):
        return value
    # Enumerations are read in their printed form.
    text = re.sub(r"<\w+\.(\w+): [^<>]*>", r"'\1'", value.strip())
    text = re.sub(r"^[A-Z]\w*\.(\w+)$", r"\1", text)
    if text.lower() in _WORDS:
        # The text "none" is not converted, as it may be a setting's value for "off".
        return text if text == "none" else _WORDS[text.lower()]
    try:
        return _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, _NoLiteral, RecursionError, MemoryError):
        return text


class _NoLiteral(Exception):
    """Raised for text that is no Python literal."""


def _evaluated(node: ast.expr) -> Any:
    """Return the value of a literal, which may add and repeat lists: ``[0]*3 + [1]*58``."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_evaluated(element) for element in elements]
        case ast.Dict(keys=keys, values=values) if all(keys):
            names = [_evaluated(key) for key in keys if key is not None]
            return dict(zip(map(str, names), map(_evaluated, values), strict=True))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _evaluated(operand)
            if isinstance(value, int | float):
                return -value
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _evaluated(left), _evaluated(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _evaluated(left), _evaluated(right)
            first, second = (first, second) if isinstance(first, list) else (second, first)
            if isinstance(first, list) and isinstance(second, int):
                times = min(second, _LONGEST + 1)
                if len(first) * times <= _LONGEST:
                    return first * times
    raise _NoLiteral


def layout_text(layout: Value) -> Value:
    """Return Megatron's text for a pipeline ``layout``, which may be a list.

    The list has for each stage its layers, as a list or as text: ``[["embedding", "decoder",
    "decoder"], ["decoder"], ...]`` becomes ``Ett|t|...``.

    Raises:
        ValueError: ``layout`` is something else, or has a word that is no layer.
    """
    if layout is None or isinstance(layout, str):
        return layout
    if not isinstance(layout, list):
        raise ValueError(f"a layout must be text or a list of stages, not {layout!r}")
    return "|".join(map(_stage, layout))


def _stage(stage: Value) -> str:
    if isinstance(stage, str):
        return _SYMBOLS.get(stage.strip().lower(), stage.strip())
    if not isinstance(stage, list) or not all(isinstance(layer, str) for layer in stage):
        raise ValueError(f"a stage of a layout must be a list of layers, not {stage!r}")
    words = [layer.strip() for layer in stage]
    unknown = [word for word in words if word.lower() not in _SYMBOLS and word not in "EtmL"]
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} is not a layer of a layout: the layers are {', '.join(_SYMBOLS)}"
        )
    return "".join(_SYMBOLS.get(word.lower(), word) for word in words)
