"""The ratchet on plain words: how often sources break its rules is committed, and may only fall.

The rules are those of `plain_words`, the numbers those of plain_words.toml, by package. A test
fails if a number has risen, and also if it has fallen and the file still has the old one:
``python -m pytest --write-pages`` with this file lowers the numbers, and raises
none. A comment ``# plain words: REASON`` excepts a place that is right as it is.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

from tests.helpers import documents
from tests.helpers.plain_words import (
    CLASS_NAMES,
    COMMENTS,
    LONG_HELP,
    OLD_LABELS,
    OLD_NAMES,
    OPENINGS,
    PHRASES,
    SHORT_MODULE,
    SourceWords,
    count,
    docstring_errors,
    package_of,
    read_source,
    repeated_classes,
)

ROOT = Path(__file__).resolve().parents[3]
NUMBERS = ROOT / "tests/unit/house/plain_words.toml"
HEADER = """\
# Numbers of places that break the rules for plain words, by package. They may only fall:
# tests/unit/house/test_plain_words.py. Under class_names: how many public classes and aliases of
# types have the name.
"""
Counts = dict[str, dict[str, int]]


@functools.cache
def sources() -> dict[Path, SourceWords]:
    """Return the places found in each of our source files, by the file's path from the root."""
    found = {}
    for top in ("megatron_ext", "patches", "scripts", "examples", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            relative = path.relative_to(ROOT)
            # The link megatron_ext/patches is ignored, since patches/ itself is read.
            if relative.parts[:2] != ("megatron_ext", "patches"):
                found[relative] = read_source(path.read_text(), strings=top != "tests")
    return found


def counted() -> Counts:
    names = {name: len(files) for name, files in repeated_in_product().items()}
    return count(sources().items()) | {CLASS_NAMES: names}


def repeated_in_product() -> dict[str, list[Path]]:
    """Return, by name, the files of classes whose name occurs more than once in megatron_ext and
    patches; scripts and tests may repeat a name."""
    product = ("megatron_ext", "patches")
    return repeated_classes({p: words for p, words in sources().items() if p.parts[0] in product})


def committed() -> Counts:
    return tomllib.loads(NUMBERS.read_text())


def differences(old: Counts, new: Counts) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the numbers that differ between ``old`` and ``new``, as (old, new) by package and
    rule."""
    keys = {(package, rule) for both in (old, new) for package, of in both.items() for rule in of}
    numbers = {
        (p, r): (old.get(p, {}).get(r, 0), new.get(p, {}).get(r, 0)) for p, r in sorted(keys)
    }
    return {key: (was, now) for key, (was, now) in numbers.items() if was != now}


def as_text(counts: Counts) -> str:
    parts = [HEADER]
    for package in sorted(counts):
        lines = [f"{rule} = {number}" for rule, number in sorted(counts[package].items())]
        parts.append("\n".join([f'["{package}"]', *lines, ""]))
    return "\n".join(parts)


def places_of(package: str, rule: str) -> list[str]:
    if package == CLASS_NAMES:
        return [f"{path}: {rule}" for path in repeated_in_product().get(rule, [])]
    return [
        f"{path}:{place.line}: {place.text}"
        for path, source in sources().items()
        if package_of(path) == package
        for place in source.places
        if place.rule == rule
    ]


def test_no_number_rises() -> None:
    risen = [
        "\n  ".join([f"{package}, {rule}: {new}, committed {old}", *places_of(package, rule)])
        for (package, rule), (old, new) in differences(committed(), counted()).items()
        if new > old
    ]
    assert not risen, "\n".join(risen)


def test_no_number_is_out_of_date() -> None:
    """plain_words.toml has today's number of unclear places. With a number that is too high, new
    places would go unnoticed."""
    found = differences(committed(), counted())
    if documents.writes_pages and all(new < old for old, new in found.values()):
        NUMBERS.write_text(as_text(counted()))
        return
    fallen = [
        f"{package}, {rule}: {new}, committed {old}"
        for (package, rule), (old, new) in found.items()
        if new < old
    ]
    command = f"python -m pytest {documents.WRITE_PAGES} {Path(__file__).relative_to(ROOT)}"
    assert not fallen, "\n".join([*fallen, f"to lower the committed numbers: {command}"])


def test_the_numbers_are_written_as_they_are_read() -> None:
    assert tomllib.loads(as_text(committed())) == committed()
    assert NUMBERS.read_text() == as_text(committed())


def test_exceptions_are_needed_and_have_reasons() -> None:
    errors = [f"{path}, {error}" for path, source in sources().items() for error in source.errors]
    assert not errors, "\n".join(errors)


def test_modules_say_which_problem_they_solve() -> None:
    errors = [
        f"{path}: its docstring {error}"
        for path in sources()
        if path.parts[0] != "tests"
        for error in docstring_errors(path, (ROOT / path).read_text())
    ]
    assert not errors, "\n".join(errors)


LONG = "x = 1\n" * SHORT_MODULE


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", None),
        ("x = 1\n", "has no docstring"),
        ('"""Hooks of a trace."""', "says only what its path says"),
        ('"""Observer of the traced iterations, which are few."""', None),
        (f'"""Observer of the traced iterations, which are few."""\n{LONG}', "is one phrase"),
        (f'"""Observer of the traced iterations (Qi et al. 2024)."""\n{LONG}', "is one phrase"),
        (f'"""Observer of traced iterations. It never waits for them."""\n{LONG}', None),
        ('"""It waits for something.\n' + "and more\n" * 8 + '"""', "has 9 lines"),
        ('"""It waits for something.\n\n' + "    command\n" * 8 + '"""', None),
        ('"""It waits for something.\n\nNot patched:\n' + "and more\n" * 8 + '"""', None),
    ],
)
def test_errors_of_a_docstring(text: str, error: str | None) -> None:
    found = docstring_errors(Path("features/trace/hooks.py"), text)
    assert [one.partition(":")[0] for one in found] == ([error] if error else [])


def rules_of(text: str, *, strings: bool = True) -> list[str]:
    return [place.rule for place in read_source(dedent(text), strings=strings).places]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('"""Of one process."""', [OPENINGS]),
        ('"""Often read."""', []),
        ('def f():\n    """What it is."""', [OPENINGS]),
        ('async def f():\n    """As of now."""', [OPENINGS]),
        ('"""Time beside that of 1F1B."""', [PHRASES]),
        ('"""Some of it is made\nagain."""', [PHRASES]),
        ('"""``beside`` and `beside` are names."""', []),
        ('"""Nobody wants it; it is made again."""', [PHRASES] * 3),
        ('raise ValueError(f"{flag} was not asked for: drop {flag}")', [PHRASES]),
        ('raise ValueError("leave " f"{flag} out, it is not needed")', [PHRASES]),
        ('name = "besides"', []),
        ('option(help="Leave it out, please, always.")', [PHRASES]),
        (f'option(help="{"word " * 36}.")', [LONG_HELP]),
        (f'option(help="{"word " * 30}. {"word " * 30}.")', []),
        (f'text(told="{"word " * 36}.")', []),
        (f'field(metadata=setting(parse, "N", "{"word " * 36}."))', [LONG_HELP]),
        (
            f'def f(x: Annotated[int, typer.Option()]):\n    """Print {"word " * 36}."""',
            [LONG_HELP],
        ),
        ("class Event:\n    pass", [CLASS_NAMES]),
        ("class _Event:\n    pass", []),
        ("def f():\n    class Event:\n        pass", []),
        ("Event = tuple[int, str]", [CLASS_NAMES]),
        ("type Event = int", [CLASS_NAMES]),
        ("_Event = tuple[int, str]", []),
        ("EVENTS = T = 3", []),
        ("def room_of(x):\n    pass", [OLD_NAMES]),
        ("def f(*, made_again):\n    pass", [OLD_NAMES]),
        ("class RoomOf:\n    x: int", [CLASS_NAMES, OLD_NAMES]),
        ("type Way = int", [CLASS_NAMES, OLD_NAMES]),
        (
            "def f():\n    for own in range(3):\n        its_own, again = own, f(pair=own)",
            [OLD_NAMES] * 3,
        ),
        ("f.held_up = 3", [OLD_NAMES]),
        ("first_trained_stage, mushroom, always = f.hidden.way, None, ahead", []),
        ("hidden_size, marker, own_rank = 1, 2, 3", []),
        ('row = {"made_again": 3}', [OLD_LABELS]),
        ('title(f"in {n} rooms")', [OLD_LABELS]),
        ('title("heads, marked, unseen")', []),
        ("LIMIT = 3  # of a rank", [COMMENTS]),
        ("# Its bytes.\nLIMIT = 3", [COMMENTS]),
        ("LIMIT = 3  # bytes of a rank", []),
        ("# Bytes of a rank,\n# which it needs.\nLIMIT = 3", []),
        ("LIMIT = 3  # bytes\n# That of a rank.", [COMMENTS]),
        ('LIMIT = "# of a rank"', []),
    ],
)
def test_places_are_found(text: str, rules: list[str]) -> None:
    assert rules_of(text) == rules


def test_strings_names_and_comments_of_tests_are_not_read() -> None:
    text = 'way = "what was asked for is there"  # of a rank'
    assert rules_of(text) == [PHRASES, OLD_NAMES, COMMENTS]
    assert rules_of(text, strings=False) == []


def test_an_exception_is_for_its_own_place() -> None:
    lines = [
        '"""What torch calls a stage."""  # plain words: quotes torch documentation',
        "class Stage:  # plain words: torch names it so",
        '    """What it is."""',
        "# plain words: the text of Megatron",
        'raise ValueError("what was asked for is there")',
    ]
    assert rules_of("\n".join(lines)) == [OPENINGS]


@pytest.mark.parametrize("comment", ["# plain words:", "# plain words: not needed here"])
def test_a_useless_exception_is_an_error(comment: str) -> None:
    is_needed = comment.endswith(":")
    text = f'"""What it is."""  {comment}' if is_needed else f"x = 1  {comment}"
    assert len(read_source(text).errors) == 1


def test_classes_of_one_name_are_found() -> None:
    once, twice = read_source("class Event:\n    pass"), read_source("class Event:\n    x = 1")
    files = {Path("a/b.py"): once, Path("a/c.py"): twice, Path("a/d.py"): read_source("x = 1")}
    assert repeated_classes(files) == {"Event": [Path("a/b.py"), Path("a/c.py")]}


def test_differences_are_of_both_sides() -> None:
    old, new = {"a": {OPENINGS: 2, PHRASES: 1}}, {"a": {OPENINGS: 1}, "b": {PHRASES: 3}}
    assert differences(old, new) == {
        ("a", OPENINGS): (2, 1),
        ("a", PHRASES): (1, 0),
        ("b", PHRASES): (0, 3),
    }


def test_packages_are_named_by_folder() -> None:
    assert package_of(Path("megatron_ext/viz/page/cut.py")) == "megatron_ext/viz"
    assert package_of(Path("megatron_ext/config.py")) == "megatron_ext"
    assert package_of(Path("patches/megatron/core/x/y.py")) == "patches/megatron"
