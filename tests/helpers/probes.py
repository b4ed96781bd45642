"""Probes that add a dummy to a copy of the repository and list the files that a developer who adds
one changes: those edited by hand, and those that commands then write."""

from __future__ import annotations

import filecmp
import importlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.helpers import documents
from tests.helpers.documents import check_written
from tests.helpers.forked import run_forked

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("megatron_ext", "docs", "scripts", "tests")

# Edit of a file: its path, the text before which something is inserted, and the insertion. With an
# empty text the insertion comes at the end of the file, which may be new.
Edit = tuple[str, str, str]

# Tests that a probe runs: they compare lists with code, pages and other tests, and take seconds.
# Tests of trainings, pictures, plain words and outputs of commands are left out.
COMPARISONS = (
    "tests/patches/launch/test_refusals.py::test_the_docs_tell_what_is_refused",
    "tests/patches/launch/test_refusals.py::test_the_docs_tell_what_is_untried",
    "tests/unit/house/test_documented_names.py::test_who_comes_from_zero_bubble_finds_each_feature",
    "tests/unit/house/test_flags_page.py",
    "tests/unit/launch/test_auto.py::test_every_setting_has_a_variable",
    "tests/unit/model/test_estimate.py::test_the_table_of_gpus_is_that_of_the_data_sheets",
    "tests/unit/model/test_estimate.py::test_no_other_file_lists_the_gpus",
    "tests/unit/schedule/test_action.py::test_text_form",
    "tests/unit/schedule/test_conflicts.py",
    "tests/unit/schedule/test_csv.py::test_an_error_lists_the_kinds_that_a_file_may_have",
    "tests/unit/schedule/test_own_schedule.py::test_the_page_names_the_kinds_that_one_may_write",
)

# Part of a conftest that shortens searches and runs them in plain Python, as numba would compile
# them anew.
_SHORT_SEARCH = """
import pytest
from tests.helpers.few_families import only_families
from tests.helpers.short_search import shorten_search
patch = pytest.MonkeyPatch()
shorten_search(patch)
only_families(patch, "1f1b", "zb-h1", "zb-v")
"""


def touched(edits: Iterable[Edit], code: str, folder: Path) -> set[str]:
    """Copy the repository to ``folder``, make ``edits`` there, run ``code`` with the dummy, and
    write pages and records. Return the paths from the root of all files that differ then."""
    # The module `refusals` imports Megatron, here once for all probes.
    importlib.import_module("tests.behaviour.refusals")
    for name in _COPIED:
        # Compiled files are copied, except those that another process is still writing.
        ignored = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for file in ROOT.glob("*.*"):
        if file.suffix in (".md", ".toml"):
            shutil.copy2(file, folder)
    for name, before, inserted in edits:
        file = folder / name
        text = file.read_text() if file.exists() else ""
        assert text.count(before) == 1 or not before, f"{name} has changed"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text.replace(before, inserted + before) if before else text + inserted)
    log = folder / "log"
    assert run_forked(lambda: _run(code, folder), log) == 0, log.read_text()
    copies = (path for name in _COPIED for path in (folder / name).rglob("*.*"))
    return {
        str(path.relative_to(folder))
        for path in copies
        if path.suffix in (".md", ".py", ".toml", ".txt") and not _is_as_it_was(path, folder)
    }


def _is_as_it_was(path: Path, folder: Path) -> bool:
    before = ROOT / path.relative_to(folder)
    return before.exists() and filecmp.cmp(path, before)


def _run(code: str, folder: Path) -> None:
    """Run ``code``, write pages and records, and fail unless `COMPARISONS` then pass."""
    for module in list(sys.modules):
        if module.partition(".")[0] in ("megatron_ext", "scripts", "tests"):
            del sys.modules[module]
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    exec(f"{_SHORT_SEARCH}{code}\npatch.undo()", {"__name__": "__main__"})
    package = sys.modules["megatron_ext"].__file__
    assert package == str(folder / "megatron_ext" / "__init__.py")
    plugins = [word for name in ("cacheprovider", "xdist") for word in ("-p", f"no:{name}")]
    assert not pytest.main(["-q", "-s", *plugins, documents.WRITE_PAGES, *COMPARISONS])

    from tests.behaviour.__main__ import main
    from tests.behaviour.record import from_text, taken, to_text
    from tests.behaviour.refusals import refusals_by_feature

    assert not main(["write", "tests/records", "help", "names"])
    record = Path("tests/records/refusals.txt")
    # Only refusals by feature are written anew, as the rest of the record takes longer.
    new = taken(refusals_by_feature())
    record.write_text(to_text(from_text(record.read_text()) | new))


def check_listed(what: str, files: set[str], edits: Iterable[Edit]) -> None:
    """Compare ``files``, which change when a developer adds ``what``, with the list of them on the
    page architecture.md."""
    by_hand = {name for name, *_ in edits}
    assert by_hand <= files
    edited, written = (
        ", ".join(sorted(set(map(_named, names)))) for names in (by_hand, files - by_hand)
    )
    text = f"{len(files)} files: {edited}; and what these commands write: {written}."
    check_written(f"files of {what}", text, "architecture.md")


def _named(file: str) -> str:
    is_new = not (ROOT / file).exists()
    if is_new and "/features/" in file:
        return f"the feature's folder in `{Path(file).parents[1]}`"
    return f"a new one in `{Path(file).parent}`" if is_new else f"`{file}`"
