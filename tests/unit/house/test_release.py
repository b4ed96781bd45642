"""Tests of scripts/release.sh, which says whether a release can be made."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.combinations import nightly

ROOT = Path(__file__).resolve().parents[3]


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(folder / "scripts" / "release.sh"), *words], capture_output=True, text=True
    )


@pytest.mark.parametrize("words", [(), ("--tag",), ("--check", "now")])
def test_it_only_checks(words: tuple[str, ...]) -> None:
    ended = check(ROOT, *words)
    assert ended.returncode == 2 and ended.stderr == "usage: scripts/release.sh --check\n"


@nightly("it installs and trains for two minutes; test_packaging.py builds the wheel by day")
def test_a_commit_can_be_released_and_another_version_cannot(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path)], check=True)
    shutil.copy2(ROOT / "scripts" / "release.sh", tmp_path / "scripts" / "release.sh")
    git("-c", "user.name=a", "-c", "user.email=b@c", "commit", "-qam", "as it is", "--allow-empty")
    ended = check(tmp_path, "--check")
    assert ended.returncode == 0, ended.stderr
    assert "release: the quick start trains from the wheel" in ended.stdout
    init = tmp_path / "megatron_ext" / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9'))
    ended = check(tmp_path, "--check")
    assert ended.returncode == 1 and "CHANGELOG.md begins with" in ended.stderr
