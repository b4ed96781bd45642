"""Stored results of searches: what makes them out of date."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_ext.search import disk_cache

ROOT = Path(__file__).resolve().parents[3] / "megatron_ext"
NO_RESULTS = {"garbage", "progress", "text_file", "words"}  # they decide none


def test_the_digest_has_all_code_that_a_search_imports() -> None:
    """A folder that moves out of these packages would leave stale schedules in caches."""
    imported = set()
    for name in disk_cache.PACKAGES:
        for path in (ROOT / name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    package, _, rest = node.module.partition(".")
                    names = [rest] if rest else [alias.name for alias in node.names]
                    if package == "megatron_ext":
                        imported |= {name.partition(".")[0] for name in names}
    assert imported - NO_RESULTS == set(disk_cache.PACKAGES)


@pytest.mark.parametrize("name", disk_cache.PACKAGES)
def test_another_code_is_another_entry(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in disk_cache.PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "code.py").write_text("x = 1\n")
    monkeypatch.setattr(disk_cache, "__file__", str(tmp_path / "search" / "disk_cache.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk_cache._code.cache_clear()
    disk_cache.store("v", "inputs", "result")
    assert disk_cache.load("v", "inputs") == "result"
    (tmp_path / name / "code.py").write_text("x = 2\n")
    disk_cache._code.cache_clear()
    assert disk_cache.load("v", "inputs") is None
    monkeypatch.undo()
    disk_cache._code.cache_clear()
