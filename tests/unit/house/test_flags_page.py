"""docs/flags.md is what PipelineConfig declares."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

from megatron_ext.config import PipelineConfig, flag
from tests.helpers.documents import check_written


def section(setting: Field[Any]) -> str:
    is_switch = setting.default is False
    words = flag(setting.name) + ("" if is_switch else f" {setting.metadata['metavar']}")
    return f"## `{words}`\n\n{setting.metadata['help']}"


def test_every_setting_has_its_section() -> None:
    written = "\n\n".join(section(setting) for setting in fields(PipelineConfig))
    check_written("flags", written, page="flags.md")
