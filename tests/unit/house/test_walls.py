"""The walls of the architecture, checked on syntax trees, so that no import runs the wrong way.

    commands -> launch (doctor -> planner -> command -> script) -> patches -> adapter -> runtime
      -> viz -> planner -> observe, race, cost_model -> schedule_families -> search -> compile
      -> schedule

A part of a feature counts as a module of its level (`LEVELS`). Schedules are pure data that any
machine can build and prove without torch, the runtime executes them without Megatron, and only the
adapter and the patches know Megatron. A wrong import breaks nothing on the day it is written, so a
test looks for it.
"""

import ast
import functools
import graphlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.count_statements import statements

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Use:
    """Module that a file imports, or names in a string."""

    name: str
    line: int
    how: str  # "import", "import_module" (called) or "string"
    lazy: bool  # within a function, or for type checkers only


@dataclass(frozen=True)
class Wall:
    """Rule for every import in the files that it covers. Imports whose name does not contain
    ``word`` are always allowed."""

    rule: str
    covers: Callable[[str], bool]
    allows: Callable[[str, Use], bool]
    word: str = ""


@functools.cache  # cached, because each wall reads the same files
def uses(source: str, module: str, *, is_package: bool = False) -> tuple[Use, ...]:
    """Return every module that ``source``, the text of ``module``, imports or names in a string."""
    package = module if is_package else module.rpartition(".")[0]
    return tuple(_uses(ast.parse(source), package, lazy=False))


def _uses(node: ast.AST, package: str, lazy: bool) -> Iterator[Use]:
    nodes = [(node, lazy)]
    while nodes:
        node, lazy = nodes.pop()
        match node:
            case ast.Name() | ast.expr_context() | ast.operator():  # most nodes are of these types
                continue
            case ast.Import(names=names):
                for alias in names:
                    yield Use(alias.name, node.lineno, "import", lazy)
            case ast.ImportFrom(module=base, names=names, level=level):
                base = importlib.util.resolve_name("." * level + (base or ""), package)
                for alias in names:
                    yield Use(f"{base}.{alias.name}", node.lineno, "import", lazy)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if _last_name(
                function
            ) in ("import_module", "__import__"):
                name = importlib.util.resolve_name(name, package)
                yield Use(name, node.lineno, "import_module", lazy)
            case ast.Constant(value=str(text)) if re.fullmatch(r"\w+([.:]\w*)+", text):
                yield Use(text, node.lineno, "string", lazy)
            case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                lazy = True
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                lazy = True
        nodes += [(child, lazy) for child in ast.iter_child_nodes(node)]


def _last_name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


LEVELS = {  # level of each part of a feature
    "settings": "compile",
    "schedule": "compile",
    "report": "observe",
    "refusals": "adapter",
    "runtime": "runtime",
    "adapter": "adapter",
}
# By part of a feature: the module that lists this part of all features. Parts of runtime are
# imported only by their own feature.
LISTS = {
    "settings": "megatron_ext.compile.feature_settings",
    "schedule": "megatron_ext.compile.features",
    "report": "megatron_ext.observe.features",
    "refusals": "megatron_ext.adapter.refusals",
    "adapter": "megatron_ext.adapter.features",
}
_PART = re.compile(rf"megatron_ext\.features\.(\w+)\.({'|'.join(LEVELS)})\b")


def level_of(name: str) -> str:
    """Return the name that a part of a feature would have as a module of its level:
    ``megatron_ext.features.x.runtime.y`` becomes ``megatron_ext.runtime.x.y``."""
    return _PART.sub(lambda match: f"megatron_ext.{LEVELS[match[2]]}.{match[1]}", name)


def within(name: str, *tops: str) -> bool:
    """Return whether ``name`` is one of the modules ``tops`` or below one."""
    name = level_of(name)
    return any(name == top or name.startswith((f"{top}.", f"{top}:")) for top in tops)


def imports_only(*tops: str, lazily: tuple[str, ...] = ()) -> Callable[[str, Use], bool]:
    def allows(module: str, use: Use) -> bool:
        if use.how == "string" or within(use.name, *sys.stdlib_module_names, *tops):
            return True
        return use.lazy and within(use.name, *lazily)

    return allows


COMPILED = "megatron_ext.search.compiled"


# Pure packages, with which any machine can build, prove, simulate and draw schedules.
PURE = (
    *("megatron_ext.viz", "megatron_ext.planner", "megatron_ext.observe", "megatron_ext.race"),
    *("megatron_ext.cost_model", "megatron_ext.schedule_families", "megatron_ext.search"),
    *("megatron_ext.compile", "megatron_ext.schedule", "megatron_ext.base"),
    "megatron_ext.features",  # the packages themselves, whose __init__.py are empty
)


def needs_no_extra(module: str, use: Use) -> bool:
    if within(use.name, COMPILED) and use.how != "string":
        return use.lazy
    if module == COMPILED and within(use.name, "numba"):
        return True
    return imports_only("numpy", *PURE, lazily=("matplotlib", "ortools"))(module, use)


def only_in(*owners: str, names: str, strings_in: tuple[str, ...]) -> Callable[[str, Use], bool]:
    def allows(module: str, use: Use) -> bool:
        if not within(use.name, names) or within(module, *owners):
            return True
        # A string with one word is a value (``--transformer-impl transformer_engine``), one with a
        # path is a module.
        return use.how == "string" and within(module, *strings_in)

    return allows


def under(*tops: str) -> Callable[[str], bool]:
    return lambda module: within(module, *tops)


def in_package(module: str) -> bool:
    return within(module, "megatron_ext")


# A line of this list may import modules of later lines, and modules of its own line may import each
# other. A name that ends in a dot stands for the files of that package without its subpackages.
ROOMS = (
    ("megatron_ext.__main__",),
    ("megatron_ext.cli",),
    ("megatron_ext.commands",),
    ("megatron_ext.parity", "megatron_ext.rehearsal"),
    ("megatron_ext.launch.doctor",),
    ("megatron_ext.launch.planner",),
    ("megatron_ext.launch.command",),
    ("megatron_ext.launch.script", "megatron_ext.auto", "megatron_ext.bridge"),
    ("megatron_ext",),  # the module with `install`
    ("megatron_ext.launch.installation",),
    ("megatron_ext.patches",),
    ("megatron_ext.adapter",),
    ("megatron_ext.runtime",),
    ("megatron_ext.recordings", "megatron_ext.rehearsal.request", "megatron_ext.rehearsal.record"),
    ("megatron_ext.written_settings",),
    ("megatron_ext.config", "megatron_ext.families"),
    ("megatron_ext.viz",),
    ("megatron_ext.planner",),
    ("megatron_ext.observe",),
    ("megatron_ext.race",),
    ("megatron_ext.cost_model",),
    ("megatron_ext.schedule_families",),
    ("megatron_ext.search",),
    ("megatron_ext.compile",),
    ("megatron_ext.compile.two_copies",),
    ("megatron_ext.compile.transforms",),
    ("megatron_ext.compile.program",),
    ("megatron_ext.schedule",),
    ("megatron_ext.base",),
    ("megatron_ext.features",),
)
# Imports by name at run time: a family is found in this way, and a command line gets its plan.
LAZY = {("megatron_ext.compile.registry", "megatron_ext.schedule_families")}


@functools.cache
def room_of(name: str) -> int:
    """Return the position in `ROOMS` of a module, or of a name in one, by the longest matching
    entry."""
    fitting = [
        (len(top), place) for place, room in enumerate(ROOMS) for top in room if within(name, top)
    ]
    return max(fitting)[1]


def runs_one_way(module: str, use: Use) -> bool:
    if use.how == "string" or not within(use.name, "megatron_ext"):
        return True
    if use.lazy and any(module == user and within(use.name, used) for user, used in LAZY):
        return True
    return room_of(use.name) >= room_of(module)


def may_use_part(module: str, use: Use) -> bool:
    part = _PART.match(use.name)
    if use.how == "string" or part is None:
        return True
    feature, kind = part.groups()
    if module.startswith(f"megatron_ext.features.{feature}.") or module == LISTS.get(kind):
        return True
    if module == "megatron_ext.patches.features":
        return kind in ("refusals", "adapter")
    return kind == "adapter" and within(module, "megatron_ext.patches")


def in_base(module: str) -> bool:
    inner = (
        *("runtime", "patches", "adapter", "launch.doctor", "launch.planner", "launch.command"),
        "rehearsal",
    )
    names = (*PURE, *(f"megatron_ext.{name}" for name in inner))
    return in_package(module) and not within(module, *names)


def loads_without_torch(module: str, use: Use) -> bool:
    if use.lazy or use.how == "string":
        return True
    allowed = imports_only("numpy", "typer", "rich", "megatron_ext")(module, use)
    with_torch = "runtime", "adapter", "patches.megatron"
    return allowed and not within(use.name, *(f"megatron_ext.{name}" for name in with_torch))


PROGRAM = "megatron_ext.compile.program"
FAMILIES = "megatron_ext.schedule_families"
TRANSFORMS = "megatron_ext.compile.transforms"


def no_sibling(module: str, use: Use) -> bool:
    # The package itself may import its modules, because that registers them. The costs of a split
    # vocabulary are no transform.
    gathers = module in (FAMILIES, TRANSFORMS) and within(use.name, module)
    shared = within(use.name, f"{TRANSFORMS}.vocabulary_costs")
    return use.how == "string" or gathers or shared or not within(use.name, FAMILIES, TRANSFORMS)


STRINGS = (
    "megatron_ext.patches.features",
    "megatron_ext.patches.engine",
    "megatron_ext.launch.installation",
)

WALLS = {
    "one way": Wall(
        "imports run one way, in the order of `ROOMS`: what a room needs of one above it is given "
        "to it, or belongs below",
        in_package,
        runs_one_way,
    ),
    "pure": Wall(
        "pure packages import the standard library, numpy and one another only; matplotlib and "
        "ortools (extras) inside the functions that need them, and so compiled.py, which alone has "
        "numba",
        under(*PURE),
        needs_no_extra,
    ),
    "runtime": Wall(
        "runtime/ imports the standard library, torch, numpy, the logger, pure packages and "
        "runtime/ only",
        under("megatron_ext.runtime"),
        imports_only(
            "torch",
            "numpy",
            "megatron_ext.base.logger",
            "megatron_ext.runtime",
            *PURE,
        ),
    ),
    "base": Wall(
        "the files of megatron_ext/ itself and its commands import nothing that the base package "
        "does not depend on (numpy, typer and its rich), except inside a function: torch may be "
        "missing",
        in_base,
        loads_without_torch,
    ),
    "features": Wall(
        "a part of a feature is imported by higher parts of the feature, by the list of its level, "
        "and by patches (parts of adapter; features.py also those of refusals) only",
        in_package,
        may_use_part,
    ),
    "siblings": Wall(
        "families and transforms don't import each other: one reaches another through the "
        "registry, and what they share belongs below them",
        under(FAMILIES, TRANSFORMS),
        no_sibling,
    ),
    "megatron": Wall(
        "only adapter/, patches/ and launch/ name Megatron's modules, and scripts/ "
        "and examples/; features.py, engine.py and installation.py in strings only",
        in_package,
        only_in(
            "megatron_ext.adapter",
            "megatron_ext.patches.megatron",
            "megatron_ext.patches.cpu",
            "megatron_ext.launch.doctor",
            "megatron_ext.launch.command",
            "megatron_ext.launch.planner",
            names="megatron",
            strings_in=STRINGS,
        ),
    ),
    "transformer_engine": Wall(
        "only patches/transformer_engine names Transformer Engine's modules, and the adapter's "
        "room of that name; features.py, engine.py, installation.py and doctor/ may in "
        "strings",
        in_package,
        only_in(
            "megatron_ext.patches.transformer_engine",
            "megatron_ext.adapter.transformer_engine",
            names="transformer_engine",
            strings_in=(*STRINGS, "megatron_ext.launch.doctor", "megatron_ext.launch.command"),
        ),
    ),
    "targets": Wall(
        "adapter/ touches nothing of others: it imports no patch, and no engine",
        under("megatron_ext.adapter"),
        lambda module, use: not within(use.name, "megatron_ext.patches"),
    ),
    "cpu": Wall(
        "no import statement names patches/cpu.py: it can be deleted, and on a GPU none of it "
        "is imported",
        under("megatron_ext", "scripts"),
        lambda module, use: use.how != "import" or not within(use.name, "megatron_ext.patches.cpu"),
    ),
    "examples": Wall(
        "examples/ import the standard library, torch, megatron.core, megatron_ext itself and "
        "verl, which imports that example, so that they run wherever they are copied to",
        under("examples"),
        lambda module, use: (
            use.name == "megatron_ext"
            or imports_only("torch", "megatron.core", "verl")(module, use)
        ),
    ),
    "one name": Wall(
        "patches/ is imported as megatron_ext.patches: under a second name its classes would "
        "exist twice",
        under("megatron_ext", "scripts", "tests"),
        lambda module, use: use.how == "string" or not within(use.name, "patches"),
        word="patches",
    ),
}


def breaches(wall: Wall, source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return a line for each import in ``source`` that ``wall`` forbids."""
    if not wall.covers(module) or wall.word not in source:
        return []
    return [
        f"line {use.line}: {use.how} {use.name}"
        for use in uses(source, module, is_package=is_package)
        if not wall.allows(module, use)
    ]


@dataclass(frozen=True)
class File:
    """Source file of ours with its module's name and its text."""

    path: Path
    module: str
    text: str

    @property
    def uses(self) -> tuple[Use, ...]:
        return uses(self.text, self.module, is_package=self.path.name == "__init__.py")


@functools.cache
def files() -> tuple[File, ...]:
    """Return every source file of ours; those of patches/ once, under their name in the package."""
    found = []
    for top in ("megatron_ext", "patches", "scripts", "examples", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] == ("megatron_ext", "patches"):
                continue
            if parts[-1] == "__init__":
                parts = parts[:-1]
            module = ".".join(("megatron_ext", *parts) if top == "patches" else parts)
            found.append(File(path, module, path.read_text()))
    return tuple(found)


@pytest.mark.parametrize("name", WALLS)
def test_wall_holds(name: str) -> None:
    wall = WALLS[name]
    lines = [
        f"{file.path.relative_to(ROOT)}, {breach}"
        for file in files()
        for breach in breaches(
            wall, file.text, file.module, is_package=file.path.name == "__init__.py"
        )
    ]
    assert not lines, f"the rule: {wall.rule}\n  " + "\n  ".join(lines)


def test_no_circle() -> None:
    """No modules import each other in a circle, within a package or across packages. Imports within
    functions count too."""
    ours = {file.module: file for file in files() if in_package(file.module)}

    def module_of(name: str) -> str:
        while name not in ours:
            name = name.rpartition(".")[0]
        return name

    imports = {
        module: {
            module_of(use.name)
            for use in file.uses
            if use.how == "import" and within(use.name, "megatron_ext")
            if not any(module == user and within(use.name, used) for user, used in LAZY)
        }
        - {module}
        for module, file in ours.items()
    }
    tuple(graphlib.TopologicalSorter(imports).static_order())  # CycleError names the circle


def test_no_package_is_a_fifth_of_the_product() -> None:
    sizes: Counter[str] = Counter()
    for file in files():
        if in_package(file.module):
            is_feature = file.module.startswith("megatron_ext.features.")
            sizes[".".join(file.module.split(".")[: 2 + is_feature])] += statements(file.text)
    ((largest, size),) = sizes.most_common(1)
    assert size < sizes.total() / 5, largest


X, Y = "megatron_ext.features.x", "megatron_ext.features.y"
# Largest number of files in a folder, with __init__.py, so that a reader can take them in at a
# glance.
MOST_FILES = 21


def test_no_room_is_crowded() -> None:
    rooms = Counter(file.path.parent for file in files() if in_package(file.module))
    crowded = {str(room): n for room, n in rooms.items() if n > MOST_FILES}
    assert not crowded, f"too many files: {crowded}"


@pytest.mark.parametrize(
    ("name", "module", "source"),
    [
        ("pure", "megatron_ext.viz.draw", "import matplotlib"),
        ("pure", f"{PROGRAM}.simulate", "def f():\n    import torch"),
        ("pure", "megatron_ext.search.improve", "def f():\n    import numba"),
        ("pure", "megatron_ext.search.improve", "from . import compiled"),
        ("pure", f"{PROGRAM}.verify", "from megatron_ext.runtime import executor"),
        ("pure", f"{PROGRAM}.verify", "from ...runtime.executor import execute"),
        ("pure", f"{PROGRAM}.verify", "from ... import __version__"),
        ("pure", "megatron_ext.schedule.costs", "importlib.import_module('torch')"),
        ("runtime", "megatron_ext.runtime.executor", "import megatron.core"),
        ("runtime", "megatron_ext.runtime.executor", "from megatron_ext.patches import engine"),
        ("runtime", "megatron_ext.runtime.executor", "import megatron_ext.config"),
        ("base", "megatron_ext.config", "import torch"),
        ("base", "megatron_ext.cli", "from megatron_ext.runtime import bench"),
        ("features", "megatron_ext.config", f"from {X}.settings import X"),
        ("features", f"{Y}.adapter", f"import {X}.adapter"),
        ("features", "megatron_ext.patches.engine", f"from {X} import refusals"),
        ("features", "megatron_ext.adapter.features", f"from {X}.runtime import owner"),
        ("one way", f"{X}.runtime.y", f"from {X}.adapter import hooks"),
        ("one way", f"{X}.settings", "from megatron_ext.config import PipelineConfig"),
        ("pure", f"{X}.report", "import torch"),
        ("runtime", f"{X}.runtime.y", "import megatron.core"),
        ("siblings", f"{FAMILIES}.zero_bubble", "from .line import one_forward_one_backward"),
        ("siblings", f"{FAMILIES}.zero_bubble", f"def f():\n    from {TRANSFORMS} import offload"),
        ("siblings", f"{TRANSFORMS}.offload", f"import {FAMILIES}.line"),
        ("siblings", TRANSFORMS, f"import {FAMILIES}.line"),
        ("megatron", "megatron_ext.runtime.stage", "from megatron.core import parallel_state"),
        ("megatron", "megatron_ext.patches.features", "import megatron.training"),
        ("megatron", "megatron_ext.patches.transformer_engine.linear", "import megatron.core"),
        ("megatron", "megatron_ext.config", "NAME = 'megatron.core.parallel_state'"),
        ("megatron", "megatron_ext.config", "f'megatron.core.{name}'"),
        ("transformer_engine", "megatron_ext.patches.megatron.core.x", "import transformer_engine"),
        (
            "transformer_engine",
            "megatron_ext.patches.cpu",
            "TARGET = 'transformer_engine.pytorch:Linear.forward'",
        ),
        ("one way", "megatron_ext.schedule.action", "from ..compile.program import graph"),
        ("one way", f"{PROGRAM}.verify", "def f():\n    from ..registry import head"),
        ("one way", "megatron_ext.config", "from megatron_ext.patches.engine import Patch"),
        ("one way", "megatron_ext.launch.script", "import megatron_ext.launch.doctor.check"),
        ("one way", "megatron_ext.launch.planner.x", "import megatron_ext.launch.doctor.x"),
        ("targets", "megatron_ext.adapter.step", "from megatron_ext.patches.engine import wrap"),
        ("targets", "megatron_ext.adapter.step", "X = 'megatron_ext.patches.megatron.core'"),
        ("cpu", "megatron_ext.patches.features", "from megatron_ext.patches import cpu"),
        ("cpu", "megatron_ext.patches.features", "def f():\n    from . import cpu"),
        ("cpu", "scripts.quickstart", "import megatron_ext.patches.cpu"),
        ("examples", "examples.plain_loop", "import megatron.training"),
        ("examples", "examples.plain_loop", "from megatron_ext.launch.script import launch"),
        ("one name", "tests.unit.test_x", "from patches.engine import apply"),
    ],
)  # fmt: skip
def test_breach_is_seen(name: str, module: str, source: str) -> None:
    assert breaches(WALLS[name], source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_ext.viz.draw", "def draw():\n    import matplotlib.pyplot as plt"),
        (
            "megatron_ext.viz.draw",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import matplotlib",
        ),
        (f"{PROGRAM}.verify", "import numpy as np\nfrom .action import Action"),
        (COMPILED, "import numba\nfrom numba import njit"),
        (f"{FAMILIES}.v_auto", "from megatron_ext.compile.program.simulate import simulate"),
        ("megatron_ext.runtime.executor", "import torch\nfrom ..schedule import verify"),
        ("megatron_ext.cli", "import typer\ndef bench():\n    from .runtime import bench"),
        ("megatron_ext.launch.doctor.doctor", "NAMES = ('megatron.training', 'torch.nn')"),
        ("megatron_ext.compile.registry", "def f():\n    from ..schedule_families import line"),
        ("megatron_ext.adapter.step", "from megatron.core import parallel_state"),
        (f"{X}.adapter.hooks", f"import megatron.core, {X}.runtime, {X}.settings"),
        ("megatron_ext.adapter.features", f"from {X}.adapter.hooks import XHooks"),
        ("megatron_ext.patches.megatron.core.x", f"from {X}.adapter import y"),
        ("megatron_ext.patches.features", f"from {X}.refusals import X"),
        ("megatron_ext.config", "IMPLEMENTATION = 'transformer_engine'"),
        ("megatron_ext.patches.features", "import_module('megatron_ext.patches.cpu')"),
        ("megatron_ext.patches.features", "TARGET = 'megatron.training.training:train_step'"),
        ("megatron_ext.patches.megatron.core.x", "from megatron.core import parallel_state"),
        ("megatron_ext.patches.cpu", "import megatron.core"),
        ("megatron_ext.patches.megatron.core.x", "import megatron_ext.runtime.executor"),
        ("examples.plain_loop", "import megatron_ext\nfrom megatron.core import parallel_state"),
    ],
)  # fmt: skip
def test_lawful_source_passes(module: str, source: str) -> None:
    assert [name for name, wall in WALLS.items() if breaches(wall, source, module)] == []


def test_package_may_gather_its_modules() -> None:
    source = "from . import line, zero_bubble"
    assert breaches(WALLS["siblings"], source, FAMILIES, is_package=True) == []
