"""Tests of the files in .github: they fit GitHub's schemas, and workflows have few permissions and
run commands that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron_ext
from tests.unit.house.test_shell_scripts import shellcheck

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BY_NAME = pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)


def read(file: Path) -> dict[str, Any]:
    # with this loader "on" is no boolean
    workflow: dict[str, Any] = yaml.load(file.read_text(), yaml.BaseLoader)
    return workflow


def steps(file: Path) -> Iterator[dict[str, Any]]:
    for job in read(file)["jobs"].values():
        yield from job.get("steps", [job])  # a job may call another workflow


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/w*.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_schema(schema: str, pattern: str) -> None:
    files = [str(file) for file in ROOT.glob(pattern)]
    ended = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files],
        capture_output=True,
        text=True,
    )
    assert files and ended.returncode == 0, ended.stdout + ended.stderr


@BY_NAME
def test_least_permissions_one_run_at_a_time_and_an_end(file: Path) -> None:
    workflow = read(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    for name, job in workflow["jobs"].items():
        assert "uses" in job or int(job["timeout-minutes"]) <= 120, name
        assert "contents" not in job.get("permissions", {}), name


def test_actions_are_pinned_by_commit_and_each_by_one() -> None:
    """Every action in a workflow is pinned to one commit. A tag could be moved to other code; the
    version after the commit is a comment for readers."""
    pins: dict[str, set[str]] = {}
    for file in WORKFLOWS:
        for used in re.findall(r"uses: (?!\./)(.+)", file.read_text()):
            match = re.fullmatch(r"([\w-]+/[\w-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)", used)
            assert match, f"{file.name}: {used}"
            pins.setdefault(match[1], set()).add(match[2])
    assert pins and not [action for action, commits in pins.items() if len(commits) > 1]


def test_a_runner_of_our_own_is_requested_only_where_there_is_one() -> None:
    """A workflow requests a self-hosted runner only in a repository that has one (HAS_GPU_RUNNER).
    In clones the job used to wait a day for a runner, and failed."""
    for file in WORKFLOWS:
        for name, job in read(file)["jobs"].items():
            if "self-hosted" in job.get("runs-on", ""):
                assert job.get("if") == "vars.HAS_GPU_RUNNER == 'true'", (file.name, name)


def test_only_a_tag_is_published_once_its_wheel_has_trained() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert (jobs["publish"]["needs"], jobs["test"]["needs"]) == ("test", "build")
    # trusted publishing needs no token
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    trained = jobs["test"]["steps"][-1]["run"]
    assert "dist/*.whl" in trained and "scripts/quickstart.py" in trained


def test_the_changelog_and_the_citation_have_the_version() -> None:
    version = megatron_ext.__version__
    sections = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_report_comes_with_what_doctor_says() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "wrong.yml").read_text())
    (doctor,) = (field for field in form["body"] if field["id"] == "doctor")
    assert "megatron-ext doctor --json" in doctor["attributes"]["label"]
    assert doctor["validations"]["required"]


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
