"""The workflows of .github: GitHub's schema, what they may do, and what they run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_shell_scripts import shellcheck

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BY_NAME = pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)


def read(file: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.load(file.read_text(), yaml.BaseLoader)  # "on" is no boolean
    return workflow


def steps(file: Path) -> Iterator[dict[str, Any]]:
    for job in read(file)["jobs"].values():
        yield from job.get("steps", [job])  # a job may be another workflow


def test_github_s_schema() -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS)),
        ],
        capture_output=True,
        text=True,
    )
    assert WORKFLOWS and ended.returncode == 0, ended.stdout + ended.stderr


@BY_NAME
def test_least_permissions_one_run_at_a_time_and_an_end(file: Path) -> None:
    workflow = read(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for name, job in workflow["jobs"].items():
        assert "uses" in job or int(job["timeout-minutes"]) <= 120, name
        assert "contents" not in job.get("permissions", {}), name


@BY_NAME
def test_actions_are_pinned_by_major_version(file: Path) -> None:
    for step in steps(file):
        if "uses" in step and not step["uses"].startswith("./"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"])


def test_pull_requests_stay_away_from_runners_of_our_own() -> None:
    for file in WORKFLOWS:
        if "self-hosted" in file.read_text():
            assert "pull_request" not in "".join(read(file)["on"])


@BY_NAME
def test_commands_pass_shellcheck_and_what_they_name_exists(file: Path) -> None:
    for step in steps(file):
        if "run" not in step:
            continue
        command = re.sub(r"\$\{\{.*?\}\}", "value", step["run"])
        ended = shellcheck("--shell=bash", "-", text=command)
        assert ended.returncode == 0, ended.stdout
        for path in re.findall(r"\b(?:tests|scripts)/[\w/.*-]+", command):
            assert list(ROOT.glob(path)), path
