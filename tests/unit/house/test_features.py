"""Tests that features take part in a training by hooks only, and that the files at the core of a
training name no feature."""

import ast
from pathlib import Path

import pytest

from tests.unit.house.test_walls import uses, within

ROOT = Path(__file__).resolve().parents[3]
STEP = ROOT / "megatron_ext/adapter/step"
AT_MOST = 18  # number of our modules that pipeline_training.py imports, which may only fall

# Modules and folders that belong to features.
OF_FEATURES = (
    *("adapter.slices", "adapter.pairs"),
    "adapter.transformer_engine",
    "adapter.step.sliced_stage",
    "adapter.tied",
    "runtime.slices",
    "features",
)
CORE = (
    *(
        "adapter/step/pipeline_training.py",
        "adapter/step/passes.py",
        "adapter/step/pipeline_step.py",
    ),
    *("adapter/step/call.py", "adapter/step/connections.py", "adapter/step/step_hooks.py"),
    *("adapter/step/training_hooks.py", "adapter/observers/observer.py", "runtime/executor.py"),
    *("runtime/stage_io.py", "runtime/stage_passes.py", "adapter/stock/stock_step.py"),
    *("adapter/arguments.py", "adapter/programs.py"),
)
# Words for options of a schedule, and for what these options do.
OF_OPTIONS = (
    *("vocab", "offload", "recompute", "overlap", "pairs", "post_validation", "profile"),
    *("host", "batched"),
)


def imported(text: str) -> set[str]:
    """Return the modules of ours that a module with this ``text`` imports, within functions too."""
    return {
        use.name.removeprefix("megatron_ext.")
        for use in uses(text, "megatron_ext.module")
        if use.how != "string" and within(use.name, "megatron_ext")
    }


def of_features(text: str) -> set[str]:
    return {name for name in imported(text) if within(name, *OF_FEATURES)}


@pytest.mark.parametrize("path", CORE)
def test_core_files_import_no_feature(path: str) -> None:
    assert not of_features((ROOT / "megatron_ext" / path).read_text())


def test_a_feature_that_is_imported_is_found() -> None:
    inside = "def f():\n    from megatron_ext.features.race.adapter.hooks import RaceHooks\n"
    assert of_features(inside) == {"features.race.adapter.hooks.RaceHooks"}
    assert of_features("from megatron_ext.features import race") == {"features.race"}
    assert of_features("import megatron_ext.adapter.pairs.hooks") == {"adapter.pairs.hooks"}


def test_only_trainings_import_the_list_of_features() -> None:
    package = ROOT / "megatron_ext"
    importers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(within(name, "adapter.features") for name in imported(path.read_text()))
    }
    assert importers == {
        "adapter/arguments.py",
        "adapter/step/pipeline_training.py",
        "adapter/stock/stock_step.py",
    }


def test_the_construction_of_programs_names_no_feature() -> None:
    """The file that builds a problem and its program (compile/build.py) names no feature. Only
    whether microbatches are cut, and which stages are trained, may be read there, because every
    family has to know these; hooks of `compile.features` do everything else."""
    tree = ast.parse((ROOT / "megatron_ext/compile/build.py").read_text())
    assert not named_features(tree)


def test_a_feature_that_is_named_in_a_construction_is_found() -> None:
    assert named_features(ast.parse("if problem.options.activation_offload: pass")) == {
        "activation_offload"
    }
    assert named_features(ast.parse("schedule = divide_vocabulary(schedule)"))
    assert not named_features(ast.parse("problem.slices.count, problem.first_trained_stage"))


def named_features(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in names if any(word in name.lower() for word in OF_OPTIONS)}


def test_the_training_imports_no_more_modules_than_it_did() -> None:
    names = imported((STEP / "pipeline_training.py").read_text())
    assert len({name.rpartition(".")[0] for name in names}) == AT_MOST
    for name in OF_FEATURES:  # each listed module still exists
        place = ROOT / "megatron_ext" / name.replace(".", "/")
        assert place.is_dir() or place.with_suffix(".py").is_file(), name
