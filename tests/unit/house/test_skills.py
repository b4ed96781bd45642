"""Tests of the guides for coding assistants in skills/: their form, and that their commands run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app

ROOT = Path(__file__).resolve().parents[3]
GUIDES = sorted((ROOT / "skills").glob("*/SKILL.md"))
EACH_GUIDE = pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.parent.name)

# Beginnings of commands in the guides that are not run here.
NOT_RUN = (
    "pytest ",
    "ruff ",
    # The command plan searches; tests/pipeline/commands/test_documented_commands.py runs a plan.
    "megatron-ext plan ",
    "megatron-ext doctor",  # this command needs Megatron; tests/unit/commands/test_cli.py runs it
    # The command trace needs a run; tests/pipeline/commands/test_documented_commands.py has one.
    "megatron-ext trace ",
)


@EACH_GUIDE
def test_it_says_what_it_is_for(guide: Path) -> None:
    """A guide's description says when to use it, because an assistant chooses guides by name and
    description alone."""
    _, head, text = guide.read_text().split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields.keys() == {"name", "description", "license", "when_to_use"}
    assert fields["name"] == guide.parent.name
    # The header of a guide is plain YAML.
    assert all(len(value) < 1024 and ": " not in value for value in fields.values())
    assert text.lstrip().startswith("# ") and len(text.splitlines()) < 80


@EACH_GUIDE
def test_the_page_of_guides_names_it(guide: Path) -> None:
    assert f"skills/{guide.parent.name}`" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("folder", [".claude/skills", ".agents/skills"])
def test_assistants_find_them(folder: str) -> None:
    assert (ROOT / folder).resolve() == ROOT / "skills"


@EACH_GUIDE
def test_its_commands_run(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    blocks = re.findall(r"```bash\n(.*?)```", guide.read_text(), re.DOTALL)
    commands = [line.strip() for block in blocks for line in block.splitlines()]
    assert commands
    for command in commands:
        if not command or command.startswith(NOT_RUN):
            continue
        name, *words = shlex.split(command)
        assert name == "megatron-ext", command
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{command}: {result.output}"
