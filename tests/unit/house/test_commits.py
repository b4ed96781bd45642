"""Tests of commit messages: the subject says in one sentence what is true after the commit, the
body why; no commit is a merge."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FIRST = "90ca8bbbc124"  # older commits are not checked
LONGEST = 120  # characters of a subject at most


def _git(*words: str) -> str | None:
    """Return the output of git, or None if git or the history is missing."""
    try:
        return subprocess.run(
            ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None


def test_commits_have_a_subject_and_a_body_and_are_no_merges() -> None:
    commits = _git("log", "--format=%h%x1f%p%x1f%B%x1e", f"{FIRST}..HEAD")
    if commits is None:
        print(f"the history since {FIRST} is not in this copy: nothing was checked")
        return
    wrong = []
    for commit in filter(str.strip, commits.split("\x1e")):
        name, parents, message = commit.strip().split("\x1f")
        wrong += [f"{name}: {problem}" for problem in problems(parents, message)]
    assert not wrong, "\n".join(wrong)


def problems(parents: str, message: str) -> list[str]:
    """Return what is wrong with a commit with these ``parents`` and this ``message``."""
    subject, _, rest = message.strip().partition("\n")
    found = []
    if len(parents.split()) > 1:
        found.append("is a merge: rebase instead")
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, more than {LONGEST}")
    if len(subject.split()) < 3 or subject.endswith(".") or re.search(r"[.!?] [A-Z]", subject):
        found.append(f"the subject is not one sentence without a full stop: {subject}")
    if not rest.startswith("\n") or not rest.strip():
        found.append("has no body, behind an empty line, that says why")
    return found


GOOD = "A limit in bytes counts messages\n\nA rank ran out of memory: test_limits.py."


@pytest.mark.parametrize(
    ("parents", "message", "told"),
    [
        ("a1b2", GOOD, 0),
        ("a1b2 c3d4", GOOD, 1),
        ("a1b2", GOOD.partition("\n")[0], 1),
        ("a1b2", GOOD.replace("\n\n", "\n"), 1),
        ("a1b2", GOOD.replace("messages", "messages."), 1),
        ("a1b2", GOOD.replace("bytes counts", "bytes. It counts"), 1),
        ("a1b2", f"Fix\n\n{GOOD}", 1),
        ("a1b2", GOOD.replace("counts", "counts" * 20), 1),
    ],
)
def test_what_is_wrong_with_a_commit(parents: str, message: str, told: int) -> None:
    assert len(problems(parents, message)) == told
