"""Tests that other packages still have the code by which our stand-ins for them, and the reader of
recipes, were written.

A stand-in would pass its tests for years after the package has changed. stand_ins.toml has digests
of the functions by which each stand-in was written. Packages are read as text and not imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.combinations import nightly
from tests.helpers.fetched import fetched
from tests.helpers.transformer_engine_on_cpu import VERSIONS

ROOT = Path(__file__).parents[3]
TABLE: dict[str, dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_name("stand_ins.toml").read_text()
)
CALLERS = "".join(file.read_text() for file in (ROOT / "scripts" / "callers").glob("*.txt"))

# Names of packages by the folder of their sources.
PACKAGES = {
    "megatron/bridge": "megatron-bridge",
    "megatron/core": "megatron-core",
    "mbridge": "mbridge",
    "mcore_bridge": "mcore-bridge",
    "skyrl": "skyrl",
    "swift": "ms-swift",
    "transformer_engine": "transformer_engine",
    "verl": "verl",
}
PAGE = ROOT / "tests" / "README.md"
WORDS = {  # names of packages in tests/README.md
    "mbridge": "mbridge",
    "megatron-bridge": "Megatron-Bridge",
    "megatron-core": "Megatron",
    "mcore-bridge": "mcore-bridge",
    "ms-swift": "ms-swift",
    "skyrl": "SkyRL",
    "transformer_engine": "Transformer Engine",
    "verl": "verl",
}


def package_of(source: str) -> str:
    return next(package for folder, package in PACKAGES.items() if source.startswith(f"{folder}/"))


def versions() -> Iterator[tuple[str, str]]:
    """Yield the packages that stand-ins replace, in the versions that tests use."""
    for package in ("mbridge", "mcore-bridge", "megatron-bridge", "ms-swift", "skyrl", "verl"):
        (version,) = set(re.findall(rf"^{package}==(\S+)", CALLERS, re.MULTILINE))
        yield package, version
    yield from (("transformer_engine", version) for version in VERSIONS)
    yield "megatron-core", importlib.metadata.version("megatron-core")


def folder_of(package: str, version: str) -> Path:
    if package != "megatron-core":
        return fetched(package, version)
    found = importlib.util.find_spec("megatron.core")
    assert found is not None and found.origin is not None
    return Path(found.origin).parents[2]


def digest(folder: Path, source: str) -> str | None:
    """Return 12 hex digits over the code of ``source``, PATH:NAME, as `source_digest` does. Return
    None if there is no such function or class."""
    path, _, name = source.partition(":")
    if not (folder / path).is_file():
        return None
    node: ast.AST = ast.parse((folder / path).read_text())
    for part in name.split("."):
        found = next((inner for inner in ast.walk(node) if _is_named(inner, part)), None)
        if found is None:
            return None
        node = found
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]


def _is_named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name


def changes(package: str, version: str, folder: Path) -> list[str]:
    """Return the sources in ``folder``, a version of ``package``, whose code differs from that in
    the table, each with its stand-in. A version that the table lacks may have the code of any
    listed version."""
    told = []
    entries = [
        (ours, source, {v: code for key, code in known.items() for v in key.split(", ")})
        for ours, sources in TABLE.items()
        for source, known in sources.items()
        if package_of(source) == package
    ]
    listed = {known for _, _, by_version in entries for known in by_version}
    for ours, source, known in entries:
        found = digest(folder, source)
        if found in ({known.get(version)} if version in listed else known.values()):
            continue
        change = "is gone" if found is None else f"has changed, to {found}"
        by = f"by that of {', '.join(known)} was written {ours}"
        told.append(f"{package} {version}: {source} {change}; {by}")
    return told


@nightly("by day trainings run with the stand-ins")
@pytest.mark.parametrize(("package", "version"), [*versions()])
def test_packages_are_those_by_which_stand_ins_were_written(package: str, version: str) -> None:
    """Each package still has the code for which our stand-ins were written. A developer who reads a
    change and finds that the stand-in is still right adds the new digest to the table."""
    assert not changes(package, version, folder_of(package, version))


def test_a_change_is_reported_with_the_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, function = "tests/helpers/verl_actor.py:Workers", "verl/workers.py:Group.split"
    other = "verl/workers.py:Group.gather"
    file = tmp_path / "verl" / "workers.py"
    file.parent.mkdir()

    def write(split: str) -> str | None:
        body = f"    def split(self, data): {split}\n    def gather(self, data): return data\n"
        file.write_text(f"class Group:\n{body}")
        return digest(tmp_path, function)

    codes = {"0.8.0, 0.9.0": write("return data.halves()"), "0.9.1": write("return data.parts()")}
    known = {function: codes, other: {"0.9.1": digest(tmp_path, other)}}
    monkeypatch.setitem(globals(), "TABLE", {stand_in: known})
    assert changes("verl", "0.9.1", tmp_path) == []
    write("return data.halves()  # as before")
    assert changes("verl", "0.9.2", tmp_path) == []
    assert len(changes("verl", "0.9.1", tmp_path)) == 1, "code of another version"
    written = write("return data")
    assert changes("verl", "0.9.2", tmp_path) == [
        f"verl 0.9.2: {function} has changed, to {written}; by that of 0.8.0, 0.9.0, 0.9.1 was "
        f"written {stand_in}"
    ]
    file.unlink()
    assert [text.partition(";")[0] for text in changes("verl", "0.9.2", tmp_path)] == [
        f"verl 0.9.2: {name} is gone" for name in (function, other)
    ]


def test_the_table_has_all_stand_ins() -> None:
    """stand_ins.toml lists all stand-ins, and tests/README.md names each with the packages of its
    digests."""
    for ours in TABLE:
        assert digest(ROOT, ours), ours
    stand_ins = {
        f"tests/helpers/{name}.py"
        for name in ("verl_actor", "verl_platform", "stand_ins", "swift_sft")
    }
    stand_ins |= {str(file.relative_to(ROOT)) for file in ROOT.glob("tests/helpers/*_on_cpu.py")}
    written = {ours.partition(":")[0] for ours in TABLE}
    starting = {  # these start other stand-ins, or stand in for NeMo-RL, which no package index has
        f"tests/helpers/{name}_on_cpu.py" for name in ("verl", "swift", "nemo_rl")
    }
    assert stand_ins - starting <= written
    rows = re.findall(r"(?m)^\| (`(?:helpers|gpu)/.*?`) \| .*? \| (.*?) \|", PAGE.read_text())
    page = {f"tests/{path}": told for paths, told in rows for path in re.findall(r"`(.*?)`", paths)}
    assert not [path for path in page if not (ROOT / path).exists()]
    packages: dict[str, set[str]] = {}
    for ours, sources in TABLE.items():
        packages.setdefault(ours.partition(":")[0], set()).update(map(package_of, sources))
    for path, expected in packages.items():
        if path.startswith("tests/"):
            assert set(page[path].split(", ")) == {WORDS[package] for package in expected}, path
