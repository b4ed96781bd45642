"""Tests of the cache of search results: what makes them out of date, and whose files it reads."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.base import progress
from megatron_ext.search import disk_cache

ROOT = Path(__file__).resolve().parents[3] / "megatron_ext"
# Packages that do not affect what a search finds: text, files and progress, and the settings of
# features, which only say how flags are read.
NO_RESULTS = {"base", "features"}


def test_the_digest_has_all_code_that_a_search_imports() -> None:
    """The cache's digest covers all packages that a search imports. If a search imported code from
    another package, a change of that code would leave outdated schedules in caches."""
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


@pytest.mark.parametrize("name", [*disk_cache.PACKAGES, "features/a/schedule", "features/b"])
def test_another_code_is_another_entry(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "schedule.py" if name == "features/b" else "code.py"
    for package in {*disk_cache.PACKAGES, name}:
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / code).write_text("x = 1\n")
    monkeypatch.setattr(disk_cache, "__file__", str(tmp_path / "search" / "disk_cache.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk_cache._code.cache_clear()
    disk_cache.store("v", "inputs", "result")
    assert disk_cache.load("v", "inputs") == "result"
    (tmp_path / name / code).write_text("x = 2\n")
    disk_cache._code.cache_clear()
    assert disk_cache.load("v", "inputs") is None
    monkeypatch.undo()
    disk_cache._code.cache_clear()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the list of the remarks that the test prints."""
    texts: list[str] = []
    monkeypatch.setattr(progress, "_REMARKS", set())
    with progress.reporting(texts.append):
        yield texts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    return tmp_path / "home" / "cache" / "megatron_ext"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_cache_is_its_users_alone(umask: int, folder: Path) -> None:
    """Only its own user can write to a cache. Under umask 000 any user used to be able to put
    compiled code into it, which the next run executed."""
    before = os.umask(umask)
    try:
        disk_cache.store("v", "inputs", "result")
    finally:
        os.umask(before)
    assert disk_cache.load("v", "inputs") == "result"
    for path in (folder, folder.parent, folder.parent.parent):
        assert path.stat().st_mode & 0o777 == 0o700, path


@pytest.mark.parametrize("fault", ["writable", "group", "foreign"])
def test_a_cache_that_others_may_have_filled_is_not_used(
    fault: str, folder: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that other users may have written to is not used. Its results used to be taken and
    its compiled code executed, whoever had put them there."""
    disk_cache.store("v", "inputs", "result")
    if fault == "foreign":
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    else:
        folder.chmod(0o777 if fault == "writable" else 0o770)
    entries = sorted(folder.iterdir())
    for _ in range(2):
        assert disk_cache.load("v", "inputs") is None
        disk_cache.store("v", "others", "result")
    assert sorted(folder.iterdir()) == entries
    (line,) = heard
    assert f"{folder} is not used" in line and "XDG_CACHE_HOME" in line


@pytest.mark.parametrize("fault", ["pipe", "device", "large", "table"])
def test_an_entry_that_is_no_file_of_ours_is_not_read(fault: str, folder: Path) -> None:
    """A cache entry that is no regular file of plausible size is not read. A link to /dev/zero used
    to take all memory, a pipe blocked forever, and a file of 1.5 GB was read."""
    disk_cache.store("v", "inputs", "result")
    (entry,) = folder.iterdir()
    if fault == "large":
        os.truncate(entry, 1_500_000_000)
    else:
        entry.unlink()
        if fault == "pipe":
            os.mkfifo(entry)
        elif fault == "device":
            entry.symlink_to("/dev/zero")
        else:
            entry.mkdir()
    assert disk_cache.load("v", "inputs") is None


def test_without_a_home_nothing_is_stored(
    tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a user without a home nothing is stored. Such a user used to get a folder `~` in the
    working directory, from which the next run took its results."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)

    def unknown(number: int) -> Any:
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    disk_cache.store("v", "inputs", "result")
    assert disk_cache.load("v", "inputs") is None and not list(tmp_path.iterdir())
    (line,) = heard
    assert "no home" in line


@pytest.mark.parametrize("fault", ["pipe", "device", "large", "foreign", "writable"])
def test_compiled_code_of_others_is_not_loaded(
    fault: str, tmp_path: Path, heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code of other users is not loaded, and a pipe in its place does not block a run.
    numba used to execute the pickles in its cache, even if another user had put them there."""
    compiled = pytest.importorskip("megatron_ext.search.compiled")
    folder = tmp_path / "megatron_ext" / "numba"
    entry = folder / "search_0" / "pack.nbi"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached: list[bool] = []

    class Dispatcher:
        def compile(self, signature: object) -> None:
            pass

    def njit(function: object, cache: bool = False) -> Dispatcher:
        cached.append(cache)
        return Dispatcher()

    monkeypatch.setattr(compiled, "njit", njit)
    compiled._compiled.__wrapped__()
    assert cached.pop() and folder.stat().st_mode & 0o777 == 0o700 and not heard
    entry.parent.mkdir()
    if fault == "pipe":
        os.mkfifo(entry)
    elif fault == "device":
        entry.symlink_to("/dev/zero")
    else:
        entry.touch(0o600)
    if fault == "large":
        os.truncate(entry, 1_500_000_000)
    elif fault == "foreign":
        status, owner = os.lstat, os.geteuid()

        def of_another(path: Any, **how: Any) -> os.stat_result:
            found = list(status(path, **how))
            found[4] = owner + (os.fspath(path) == str(entry))
            return os.stat_result(found)

        monkeypatch.setattr(os, "lstat", of_another)
        monkeypatch.setattr(Path, "lstat", lambda path: of_another(path))
    elif fault == "writable":
        entry.chmod(0o666)
        compiled._compiled.__wrapped__()
        assert cached.pop(), "others cannot reach what lies in a folder of 0700"
        folder.chmod(0o755)
    compiled._compiled.__wrapped__()
    assert cached == [False]
    (line,) = heard
    assert entry.name in line and str(folder) in line
