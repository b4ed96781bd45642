"""The ratchet on names that several files share, and on old words in the names of files.

No two public functions of modules in megatron_ext and patches have the same name, and no two files
in megatron_ext, unless names.toml lists the name with the number of files and a reason. Excepted
are the function `patches`, which each file of patches/ defines, the names of files in patches/,
which mirror other packages, and the parts of features. test_plain_words.py counts the names of
classes, aliases and all other names that files bind.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.helpers.plain_words import old_words
from tests.unit.house.test_walls import LEVELS

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_name("names.toml")
PATCHES = "patches"  # a folder, and a function in each of its files
_FUNCTION = re.compile(r"^(?:async )?def ([a-zA-Z]\w*)", re.MULTILINE)


def files(*tops: str) -> list[Path]:
    return [
        path
        for top in tops
        for path in (ROOT / top).rglob("*.py")
        # megatron_ext/patches is a link to patches/
        if PATCHES not in path.relative_to(ROOT / top).parts
    ]


def is_named_by_its_place(path: Path) -> bool:
    """Return whether ``path`` is an ``__init__.py``, or a part of a feature."""
    return path.stem == "__init__" or (path.stem in LEVELS and path.parts[-3] == "features")


def functions(text: str) -> list[str]:
    """Return the names of the public functions of a module with this ``text``."""
    return [name for name in _FUNCTION.findall(text) if name != PATCHES]


def repeated(names: Iterable[str]) -> dict[str, int]:
    return {name: number for name, number in Counter(names).items() if number > 1}


def listed(kind: str) -> dict[str, int]:
    entries = tomllib.loads(LIST.read_text())[kind]
    assert all(entry["why"] for entry in entries)
    return {name: number for entry in entries for name, number in entry["names"].items()}


def differences(found: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """Return a line for each name that occurs in more or fewer files than names.toml says."""
    return [
        f"{name}: in {found.get(name, 1)} files, listed for {known.get(name, 1)}: find another "
        f"name, or correct {LIST.relative_to(ROOT)}"
        for name in sorted(found.keys() | known.keys())
        if found.get(name, 1) != known.get(name, 1)
    ]


def test_a_public_function_has_a_name_of_its_own() -> None:
    product = files("megatron_ext", PATCHES)
    names = (name for path in product for name in functions(path.read_text()))
    assert not differences(repeated(names), listed("functions"))


def test_a_file_has_a_name_of_its_own() -> None:
    names = (path.stem for path in files("megatron_ext") if not is_named_by_its_place(path))
    assert not differences(repeated(names), listed("files"))


def test_no_file_has_an_old_word_in_its_name() -> None:
    assert not [path for path in files("megatron_ext", "scripts") if old_words(path.stem)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def judge(x):\n    def inner():\n        pass", ["judge"]),
        ("async def judge(x): pass\ndef read[T](x: T): pass", ["judge", "read"]),
        ("class Judge:\n    def judge(self):\n        pass", []),
        ("def _judge(): pass\ndef patches(): pass", []),
    ],
)
def test_public_functions_are_found(text: str, names: list[str]) -> None:
    assert functions(text) == names


def test_a_name_that_is_repeated_more_or_less_often_than_listed_is_reported() -> None:
    found = repeated(["judge", "judge", "read", "read", "read", "once", "mend"])
    told = differences(found, {"read": 2, "mend": 2, "gone": 2})
    assert [line.split(":")[0] for line in told] == ["gone", "judge", "mend", "read"]
    assert not differences(found, {"judge": 2, "read": 3})


@pytest.mark.parametrize("level", ["unit", "pipeline", "patches", "gpu"])
def test_a_test_file_has_a_name_of_its_own_in_its_level(level: str) -> None:
    """No two test files in one level of tests (unit, patches, pipeline and so on) have the same
    name, which would not say which subject each is about. Two files of one name in two levels are
    about the same subject."""
    found = [path.name for path in (ROOT / "tests" / level).rglob("test_*.py")]
    assert found
    assert not repeated(found)
