"""Tests that the messages that docs/troubleshooting.md quotes exist in the code."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = [
    " ".join(quoted.split())
    for bold in re.findall(r"\*\*(.*?)\*\*", PAGE, re.DOTALL)
    for quoted in re.findall(r"`([^`]+)`", bold)
]
# Words on the page that stand for a value of the run.
VALUE = re.compile(r"\b(?:[A-Z]|NAME|FILE|HOST|SETTING)\b|dp_reshardable|\.\.\.")
# Messages of other packages: the package, and the file in it.
OTHERS = {
    "Global shape mismatch for loaded": (
        "megatron.core",
        "dist_checkpointing/strategies/torch.py",
    ),
    "CheckpointException ranks:": ("torch", "distributed/checkpoint/api.py"),
}
# Messages of Megatron-LM's pretrain_gpt.py, which does not belong to the package megatron.core.
ELSEWHERE = {"found NaN in local forward loss calculation"}


def template(text: ast.expr) -> str:
    """Return the text of a string or an f-string. A flag in the f-string is written out, and any
    other value becomes a line break."""
    match text:
        case ast.Constant(str(value)):
            return value
        case ast.JoinedStr(parts):
            return "".join(template(part) for part in parts)
        case ast.FormattedValue(ast.Call(ast.Name("flag"), [ast.Constant(str(name))])):
            return f"--pipeline-{name.replace('_', '-')}"
    return "\n"


FILES = [
    path
    for folder in ("megatron_ext", "patches", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@cache
def said() -> str:
    """Return all texts in our code and scripts, which may be printed."""
    return said_in(FILES)


def said_in(files: Iterable[Path]) -> str:
    """Return all texts in the code of ``files``, which may be printed."""
    return "\n\n".join(
        template(node)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    )


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 30


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_exists(message: str) -> None:
    if message in ELSEWHERE:
        return
    if message in OTHERS:
        package, file = OTHERS[message]
        spec = importlib.util.find_spec(package)  # finds the package without importing it
        assert spec is not None and spec.origin is not None
        assert message in (Path(spec.origin).parent / file).read_text()
        return
    literal = [part.strip(" ,:()") for part in VALUE.split(message)]
    assert sum(map(len, literal)) >= 10
    for part in literal:
        assert part in said(), f"nobody says {part!r}"


def test_lines_of_the_log_come_from_the_files_that_architecture_names() -> None:
    """The log lines in docs/architecture.md come from the files that its table names, so that no
    reader is sent to the wrong file."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## From a log line to its file")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) > 8
    for lines, where in rows:
        names = set(re.findall(r"`(\w+\.py)`", where))
        files = [path for path in FILES if path.name in names]
        assert {path.name for path in files} == names
        for line in re.findall(r"`([^`]+)`", lines):
            for part in VALUE.split(line.replace("SIGTERM", "")):
                assert part.strip(" :") in said_in(files), (line, where)
