"""Tests that names in the documentation exist: flags, schedules, commands with their options,
files."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from megatron_ext.cli import app
from megatron_ext.commands.jobs.job_argument import JobCommand
from megatron_ext.compile.auto_spec import auto_searches
from megatron_ext.compile.registry import choose, entries
from megatron_ext.config import OVERLAP, PLAN, PipelineConfig, flag
from megatron_ext.written_settings import our_flags

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "skills").glob("*/SKILL.md")),
]
ON_EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

MEGATRONS = {"--pipeline-model-parallel-size", "--pipeline-model-parallel-layout"}
PLACEHOLDERS = {"SPEC", "NAME", "FILE", "NAME|FILE"}  # placeholders for names of the reader's own
COMMANDS = typer.main.get_group(app).commands


def code(page: Path) -> list[str]:
    """Return the texts that ``page`` formats as code: within a line, as a block, or indented."""
    text = re.sub(r"^ {3}(?=\S)", "", page.read_text(), flags=re.MULTILINE)  # blocks within lists
    shown = r"^```(?:console|text)\n.*?^```"
    text = re.sub(shown, commands_alone, text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}(.*)$", text, re.MULTILINE)
    lines = [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", text)]
    return [*lines, *indented, *(line for block in blocks for line in block.splitlines())]


def commands_alone(block: re.Match[str]) -> str:
    """Return ``block`` without the outputs of its commands."""
    return "\n".join(["```", *re.findall(r"^\$ ((?:.*\\\n)*.*)", block[0], re.MULTILINE), "```"])


@ON_EACH_PAGE
def test_flags_exist(page: Path) -> None:
    ours = {flag(setting.name) for setting in fields(PipelineConfig)} | MEGATRONS
    for words in code(page):
        for name in re.findall(r"(?<!\w)--pipeline-[a-z0-9-]+(?!\S*\*)", words):
            assert name in ours | {"--pipeline-x"}, name


@ON_EACH_PAGE
def test_schedules_exist(page: Path) -> None:
    for words in code(page):
        for spec in re.findall(r"--pipeline-schedule[ =]([^\s`]+)", words):
            if spec in {*PLACEHOLDERS, PLAN} or re.match(r"NAME|mine\.|my_schedule\.py", spec):
                continue
            if auto_searches(spec) is not None:  # raises for an unknown search
                continue
            name, _, options = spec.partition(":")
            assert name in entries(), spec
            # An option in capitals is a placeholder for a value of the reader's.
            choose(f"{name}:{options}" if options and options.islower() else name)


@ON_EACH_PAGE
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in code(page):
        for rest in re.findall(r"megatron-ext ([a-z]\S*(?: [^#|]*)?)", words):
            name, *given = re.sub(r" -- .*", "", rest).split()
            assert name in COMMANDS, words
            command = COMMANDS[name]
            if isinstance(command, typer.core.TyperGroup):  # the word "commands" may be missing
                named = given and given[0] in command.commands
                command = command.commands[given[0] if named else "commands"]
            known = {option for p in command.params for option in p.opts} | {"--help"}
            if isinstance(command, JobCommand):
                known |= {*our_flags(), OVERLAP}
            assert {word for word in given if re.match(r"--?[a-z]", word)} <= known, words


@ON_EACH_PAGE
def test_files_exist(page: Path) -> None:
    paths = r"\b(?:tests|scripts|examples|docs|patches|megatron_ext)/[\w/.-]+\.(?:py|sh|md)\b"
    ours = re.sub(r"https?://\S+", "", page.read_text())
    for path in re.findall(paths, ours):
        assert (ROOT / path).is_file(), path


def test_who_comes_from_zero_bubble_finds_each_feature() -> None:
    """docs/comparison.md, for readers who come from the zero-bubble paper's own code, names the
    flag of every feature. It used to say that offload and measured costs are "not there yet" months
    after they existed."""
    page = (ROOT / "docs" / "comparison.md").read_text()
    to_look_at_a_run = {"trace", "trace_iters", "report_split", "metrics", "race", "race_then"}
    for setting in fields(PipelineConfig):
        assert setting.name in to_look_at_a_run or flag(setting.name) in page, setting.name
    assert "yet" not in page
