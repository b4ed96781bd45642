"""Tests that the documented table of versions agrees with the patches' declarations and with the
versions that tests run."""

from __future__ import annotations

import re
from pathlib import Path

import megatron.core

from megatron_ext.launch.doctor import doctor
from megatron_ext.launch.doctor.versions import (
    KNOWN,
    KnownVersion,
    Tried,
    declared_versions,
    version_rows,
)
from megatron_ext.patches.features import FEATURES
from megatron_ext.patches.sources import UNTAGGED
from tests.helpers import transformer_engine_on_cpu
from tests.helpers.documents import check_written, table
from tests.pipeline.training import test_versions

ROOT = Path(__file__).parents[3]
DECLARED = declared_versions(
    [patch for feature in FEATURES for patch in feature.patches(doctor._WITH_ALL_PATCHES)]
)


def test_the_page_has_the_table() -> None:
    rows = [list(row.values()) for row in version_rows(DECLARED)]
    check_written("versions", table(["", "version", "patches", "tried"], rows))


def trained(name: str) -> list[str]:
    """Return the versions of the package ``name`` that the table says have been trained."""
    versions = [known for known in KNOWN if known.name == name and known.tried is Tried.TRAINED]
    return [number for known in versions for number in re.findall(r"\d+\.\d+[.\d]*", known.version)]


def test_what_is_said_to_train_is_what_tests_train() -> None:
    numbers = trained("Megatron-LM")
    assert set(numbers) == {"0.20", "0.19.2", test_versions.VERSION}
    if not megatron.core.__version__.startswith("0.20"):
        assert megatron.core.__version__.partition("+")[0] in numbers
    engines = trained("Transformer Engine")
    assert engines == [*transformer_engine_on_cpu.VERSIONS][: len(engines)]


def test_what_is_declared_is_in_the_table_and_the_commits_are_named() -> None:
    assert {version for known in KNOWN for version in known.megatron} - {"0.17"} == DECLARED
    for version in DECLARED:
        commit = version.partition("@")[2] or UNTAGGED.get(version, "")[:7]
        assert any(version in known.megatron and commit in known.version for known in KNOWN)


def test_files_that_it_names_exist() -> None:
    files = re.findall(r"`(\S+\.py)`", " ".join(known.how for known in KNOWN))
    assert files and all((ROOT / file).exists() for file in files)


def test_a_version_that_no_patch_was_read_against_does_not_fit() -> None:
    old = KnownVersion("x", "1", ("0.17",), Tried.NOT)
    assert old.patches(frozenset({"0.18"})) == "do not fit"
    assert KnownVersion("x", "1", (), Tried.NOT).patches(DECLARED) == "not known"
