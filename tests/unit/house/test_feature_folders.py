"""Tests of features that a folder contains completely: little other code names them, and a feature
can be deleted."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals
from megatron_ext.base.setting import FeatureSettings, flag
from megatron_ext.compile.feature_settings import DECLARED
from megatron_ext.config import PipelineConfig, variable
from megatron_ext.features.post_validation.settings import POST_VALIDATION_SETTINGS
from tests.helpers.combinations import nightly
from tests.helpers.fetched import megatron_sources
from tests.unit.house.test_walls import LISTS

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = {path.parent.name: path.parent for path in ROOT.glob("megatron_ext/features/*/adapter*")}
PURE_PARTS = ("settings", "schedule", "report", "refusals")

# The largest allowed number of files outside a feature's folder that name its settings; config.py,
# which has the fields, is one of them. These numbers may only fall.
AT_MOST = {
    "arrangement": 1,
    "split_report": 2,
    "metrics": 1,
    "offload": 4,
    "post_validation": 4,
    "profile": 4,
    "race": 2,
    "shared_prompts": 1,
    "trace": 7,
    "vocabulary": 5,
}
LOOKED_AT = ("adapter", "runtime", "compile", "commands", "viz", "observe", "launch", "config.py")
_LISTS = ("adapter/features.py", "compile/features.py", "observe/features.py")
NOT_LOOKED_AT = ("compile/program", "launch/planner", *_LISTS)


def modules_of(part: str) -> list[str]:
    """Return the modules of this ``part`` of all features."""
    package = ROOT / "megatron_ext"
    files = [*package.glob(f"features/*/{part}.py"), *package.glob(f"features/*/{part}/**/*.py")]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(files)]


def test_parts_that_are_pure_need_neither_torch_nor_megatron() -> None:
    modules = [module for part in PURE_PARTS for module in modules_of(part)]
    assert len(modules) >= len(FOLDERS)
    hidden = "for name in ('torch', 'megatron', 'transformer_engine'): sys.modules[name] = None"
    code = f"import importlib, sys\n{hidden}\nfor name in {modules}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("part", LISTS)
def test_every_part_is_in_the_list_of_its_level(part: str) -> None:
    level = (ROOT / f"{LISTS[part].replace('.', '/')}.py").read_text()
    listed = level + (ROOT / "patches/features.py").read_text()
    for package in {module.partition(f".{part}")[0] for module in modules_of(part)}:
        assert f"from {package}.{part}" in listed


def test_a_setting_of_a_feature_is_a_field_and_has_one_declaration() -> None:
    fields = PipelineConfig.__dataclass_fields__
    for name, metadata in DECLARED.items():
        assert fields[name].metadata == metadata
    names = [name for feature in FOLDERS for name in names_in_declaration(feature)]
    assert {*DECLARED} == {*names} & fields.keys()


def names_in_declaration(feature: str) -> list[str]:
    """Return the names of the settings that ``feature`` declares, and the values it adds to other
    settings."""
    part = importlib.import_module(f"megatron_ext.features.{feature}.settings")
    (declared,) = (value for value in vars(part).values() if isinstance(value, FeatureSettings))
    return [*declared.declared, *declared.values]


def mentions(text: str, names: list[str]) -> Iterator[str]:
    """Yield the mentions of the settings ``names`` in a module's ``text``: attributes and keywords
    of that name, and strings that equal it or contain its flag or variable. Reading a schedule's
    options does not count."""
    written = re.compile("|".join(rf"{word}(?![\w-])" for name in names for word in words(name)))
    tree = ast.parse(text)
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Attribute(attr="options") | ast.Name(id="options")):
                continue
            case ast.Attribute(attr=name) | ast.keyword(arg=name) if name in names:
                yield f"line {node.lineno}: {name}"
            case ast.Constant(value=str(value)) if value in names or (
                written.search(value) and value not in docstrings
            ):
                yield f"line {node.lineno}: {value}"


def words(name: str) -> tuple[str, str]:
    return flag(name), variable(name)


@pytest.mark.parametrize("feature", FOLDERS)
def test_little_outside_its_folder_names_a_feature(feature: str) -> None:
    package, names = ROOT / "megatron_ext", names_in_declaration(feature)
    found = {}
    for top in LOOKED_AT:
        for path in sorted((package / top).rglob("*.py")) or [package / top]:
            name = path.relative_to(package).as_posix()
            places = [*mentions(path.read_text(), names)]
            if places and not name.startswith(NOT_LOOKED_AT):
                found[name] = places
    assert "config.py" in found  # config.py has the field of the setting
    assert len(found) <= AT_MOST[feature], found


def test_a_name_of_a_feature_is_found() -> None:
    text = '"""--pipeline-race in a docstring."""\nconfig.race\nf(race=1)\nrace = 1\ny = "race"\n'
    assert len([*mentions(text, ["race"])]) == 3
    assert [*mentions("x = f'give --pipeline-race {x}'", ["race"])]
    assert not [*mentions("x = 'write --pipeline-race-then'", ["race"])]
    assert [*mentions("config.recompute", ["recompute"])]
    assert not [*mentions("problem.options.recompute, options.recompute", ["recompute"])]


def without(feature: str, folder: Path) -> None:
    """Copy the repository into ``folder``, and delete ``feature`` there: its folder, its lines in
    the lists of features, its patches and its fields of the config."""
    for name in ("megatron_ext", "patches", "scripts", "examples", "tests", "docs", ".mypy_cache"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, symlinks=True)
    for file in ROOT.glob("*.*"):
        if file.suffix in (".toml", ".py", ".md"):
            shutil.copy2(file, folder)
    shutil.rmtree(folder / "megatron_ext/features" / feature)
    fields = names_in_declaration(feature)
    words = {name.replace("_", "_?") for name in (feature, *fields)}
    lines = re.compile(rf".*({'|'.join(words)}).*\n", re.IGNORECASE)
    package = ("megatron_ext.__init__", "megatron_ext.config", "patches.features")
    for module in (*LISTS.values(), *package):
        file = folder / f"{module.replace('.', '/')}.py"
        file.write_text(lines.sub("", file.read_text()))
    if any(module.endswith(f"{feature}.refusals") for module in modules_of("refusals")):
        part = importlib.import_module(f"megatron_ext.features.{feature}.refusals")
        (answers,) = (value for value in vars(part).values() if isinstance(value, FeatureRefusals))
        for module in answers.patches:
            (folder / "patches" / f"{module.replace('.', '/')}.py").unlink()


def done_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"MEGATRON_LM_DIR": str(megatron_sources()), "MEGATRON_EXT_NIGHTLY": ""}
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True
    )


def passes(folder: Path, *words: str) -> None:
    done = done_in(folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_split_report_can_be_deleted(tmp_path: Path) -> None:
    """The feature split_report can be deleted: its folder, its lines in the lists of features, and
    its field of the config. Types, the rules for imports and a training then still pass."""
    without("split_report", tmp_path)
    passes(tmp_path, "mypy", "megatron_ext")
    training = "test_resumed_training_is_stock_to_the_last_bit[pp2-zb-h1]"
    walls = "tests/unit/house/test_walls.py"
    passes(
        tmp_path, "pytest", "-q", walls, f"tests/pipeline/training/test_placements.py::{training}"
    )


@nightly("by day the split report is deleted in the same way")
@pytest.mark.timeout(1800)  # it runs the trainings of a whole test file
def test_post_validation_can_be_deleted(tmp_path: Path) -> None:
    """Post-validation, a feature that changes schedules, can be deleted with its patches. Its
    option of a problem stays, with the default value in all trainings; no other code reads the
    feature's setting."""
    without("post_validation", tmp_path)
    passes(tmp_path, "mypy", "megatron_ext")
    walls = "tests/unit/house/test_walls.py"
    passes(tmp_path, "pytest", "-q", walls, "tests/pipeline/training/test_parity.py")
    compared = done_in(tmp_path, *("tests.behaviour", "compare", "tests/records", "help"))
    assert compared.returncode == 1, compared.stdout + compared.stderr
    was, now = (
        Counter(
            re.findall(r"[\w-]+", " ".join(re.findall(rf"(?m)^ +{sign}:(.*)$", compared.stdout)))
        )
        for sign in ("was", "now")
    )
    (declared,) = POST_VALIDATION_SETTINGS.declared.values()
    described = re.findall(r"[\w-]+", str(declared["help"]))
    assert not now - was
    assert {*(was - now)} == {"--pipeline-post-validation", "--post-validation", *described}
