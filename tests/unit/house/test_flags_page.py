"""Tests that docs/flags.md, and the keywords of `megatron_ext.install`, agree with the fields of
PipelineConfig."""

from __future__ import annotations

import re
import textwrap
from dataclasses import Field, fields
from typing import Any

import pytest

import megatron_ext
from megatron_ext.config import PipelineConfig, flag
from tests.helpers.documents import check_between, check_written

_INSTALL = "megatron_ext/__init__.py"
_SENTENCE = re.compile(r"[.](?= [A-Z])")


def section(setting: Field[Any]) -> str:
    is_switch = setting.default is False
    words = flag(setting.name) + ("" if is_switch else f" {setting.metadata['metavar']}")
    return f"## `{words}`\n\n{setting.metadata['help']}"


def test_every_setting_has_its_section() -> None:
    written = "\n\n".join(section(setting) for setting in fields(PipelineConfig))
    check_written("flags", written, page="flags.md")


def kind(setting: Field[Any]) -> str:
    return "bool" if setting.default is False else "str"


def argument(setting: Field[Any]) -> str:
    """Return the docstring line on ``setting``: the first sentence of its help."""
    first = _SENTENCE.split(setting.metadata["help"])[0].rstrip(".")
    text = f"{setting.name} ({kind(setting)}): {first}."
    return textwrap.fill(
        text,
        100,
        initial_indent=" " * 8,
        subsequent_indent=" " * 12,
        break_on_hyphens=False,
        break_long_words=False,
    )


def test_install_has_a_typed_keyword_for_every_setting() -> None:
    """`megatron_ext.install` has a typed keyword for every setting. It used to accept any keyword,
    so editors knew none."""
    schedule, *others = fields(PipelineConfig)
    keywords = "\n".join(f"    {one.name}: {kind(one)} | None = None," for one in others)
    begin = "    schedule: str | None = None,\n    *,"
    check_between(_INSTALL, (begin, ') -> "Handle":'), keywords, "keywords of install")
    arguments = "\n".join(map(argument, (schedule, *others)))
    marks = "is not given.\n\n    Args:\n", "\n    Returns:\n        A handle:"
    check_between(_INSTALL, marks, arguments, "arguments of install")


def test_all_calls_of_install_are_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ext.launch import installation

    monkeypatch.setattr(installation, "install", lambda config: config)
    install: Any = megatron_ext.install
    assert install("zb-v") == PipelineConfig.parse(schedule="zb-v")
    assert install() == PipelineConfig.parse() == install(None, trace=None, post_validation=False)
    settings: Any = {"memory_limit": "60GiB", "post_validation": True, "slices": 1, "trace": "DIR"}
    assert install(schedule="zb-v", **settings) == PipelineConfig.parse(schedule="zb-v", **settings)
    with pytest.raises(TypeError, match="unexpected keyword argument 'schedules'"):
        install(schedules="zb-v")
