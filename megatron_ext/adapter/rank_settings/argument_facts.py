"""Megatron's arguments, or a caller's TransformerConfig, as facts that ranks must have in common.

``rank_arguments.toml`` lists arguments by how ranks are compared: by value if an argument decides a
training's results or its program, by presence alone for files, which may lie elsewhere on each
node, and not at all. An argument that is not listed, such as a script's own, is compared too, but a
difference is only a remark.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from megatron_ext.base.secrets import without_secrets
from megatron_ext.base.words import argument_flag
from megatron_ext.config import PipelineConfig, flag
from megatron_ext.runtime.store.agreement import Fact

_LONGEST = 120  # longest value in characters that a message shows whole
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class RankSetting(enum.StrEnum):
    """Classes of Megatron's arguments, by how they are compared between ranks.

    ``DECIDES``: by value. ``PATH``: by whether they are given. ``MAY_DIFFER``: not at all.
    """

    DECIDES = "decides"
    PATH = "paths"
    MAY_DIFFER = "may_differ"


@functools.cache
def known_settings() -> Mapping[str, RankSetting]:
    """Return, by name, how each known argument of Megatron's is compared between ranks."""
    tables = tomllib.loads(Path(__file__).with_name("rank_arguments.toml").read_text())
    return {
        name: setting
        for setting in RankSetting
        for names in tables[setting].values()
        for name in names.split()
    }


def argument_facts(arguments: Mapping[str, Any]) -> dict[str, Fact]:
    """Return the facts in Megatron's ``arguments`` that ranks compare, by flag.

    Our own flags are not among them: they are compared as settings.
    """
    ours = {flag(field.name) for field in fields(PipelineConfig)}
    return {
        argument_flag(name): fact
        for name, value in without_secrets(arguments).items()
        if argument_flag(name) not in ours
        and (fact := _fact(name, value, known_settings().get(name))) is not None
    }


def model_facts(config: Any, model: Any) -> dict[str, Fact]:
    """Return the facts that ranks compare in a caller's ``config`` of ``model``.

    There are none if the config is no dataclass. Fields that Megatron-Core declares must be equal;
    a difference in a field of the caller's own class is only a remark. Models of different classes
    may have different configs.
    """
    if not is_dataclass(config):
        return {}
    core = {
        name
        for base in inspect.getmro(type(config))
        if base.__module__.startswith("megatron.core.")
        for name in vars(base).get("__annotations__", ())
    }
    kind = f"{type(config).__name__} of {type(model).__name__}"
    facts = {}
    for field in fields(config):
        value = getattr(config, field.name, None)
        setting = known_settings().get(field.name)
        if setting is None and field.name in core:
            setting = RankSetting.DECIDES
        fact = None if _is_code(value) else _fact(field.name, value, setting)
        if fact is not None:
            facts[f"{kind}, {field.name}"] = fact
    return facts


def _fact(name: str, value: Any, setting: RankSetting | None) -> Fact | None:
    """Return the comparable fact of an argument; None if ranks may differ in the argument."""
    if setting is RankSetting.MAY_DIFFER:
        return None
    text = _without_paths(value) if setting is RankSetting.PATH else _words(value)
    digest = ""
    if len(text) > _LONGEST:
        digest = hashlib.sha256(text.encode()).hexdigest()
        text = f"{text[:_LONGEST]}..."
    return Fact(text, digest, decides=setting is not None)


def _words(value: Any) -> str:
    if value is None:
        return "not given"
    return value if isinstance(value, str) else _ADDRESS.sub("", repr(value))


def _without_paths(value: Any) -> str:
    """Return the words of ``value`` with "given" in place of each path; data set weights stay.

    The text is, for example, ``0.3 given 0.7 given``, or "not given" for an empty value.
    """
    words = value if isinstance(value, list | tuple) else [value] if value else []
    return " ".join(map(_weight_or_given, map(str, words))) or "not given"


def _weight_or_given(word: str) -> str:
    try:
        return str(Decimal(word).normalize())
    except InvalidOperation:
        return "given"


def _is_code(value: Any) -> bool:
    """Return whether ``value`` is a function or an object without a comparable text."""
    items = value if isinstance(value, list | tuple) else [value]
    return any(callable(item) or _ADDRESS.search(repr(item)) for item in items)
