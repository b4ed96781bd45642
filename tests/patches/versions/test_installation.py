"""Tests of `megatron_ext.install`: what it changes, what it refuses, and that undoing it leaves
nothing behind."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import megatron.core
import pytest
from megatron.core import pipeline_parallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.module import MegatronModule

import megatron_ext
from megatron_ext.adapter.compatibility import refuse, refuse_order
from megatron_ext.compile.registry import choose
from megatron_ext.config import ALLOW_UNKNOWN, PipelineConfig
from megatron_ext.launch.doctor.doctor import diagnose
from megatron_ext.patches.engine import PatchError
from megatron_ext.patches.features import needed_patches
from megatron_ext.patches.sources import UNTAGGED, UnknownSource
from megatron_ext.schedule.schedule_csv import from_csv
from tests.helpers.accepting import accepts

TOGETHER: tuple[dict[str, Any], ...] = (
    {"costs": "profile", "vocab_parallel": "1", "trace": "traces", "trace_iters": "1:2"},
    {"post_validation": True},
    {"recompute": "first:1"},
    {"slices": "4"},
    {"microbatch_order": "small-ends"},
    {"shared_prompts": "exact"},
)


def test_every_binding_is_changed_and_put_back() -> None:
    from megatron.training import training

    stock = schedules.get_forward_backward_func
    # by patched target: the combinations of settings under which it was changed
    states: dict[str, set[str]] = {}
    for settings in TOGETHER:
        with megatron_ext.install(schedule="zb-v", **settings):
            assert schedules.get_forward_backward_func is not stock
            for module in (pipeline_parallel, training):
                assert module.get_forward_backward_func is schedules.get_forward_backward_func
            for patch in diagnose(PipelineConfig()).patches:
                states.setdefault(patch.target, set()).add(patch.state)
    for target, seen in states.items():
        is_applied = "applied" in seen and seen <= {"applied", "fits"}
        assert is_applied or seen == {"not needed"}, (target, seen)
    for module in (schedules, pipeline_parallel, training):
        assert module.get_forward_backward_func is stock
    assert "applied" not in {p.state for p in diagnose(PipelineConfig()).patches}


def test_a_second_installation_changes_nothing() -> None:
    """A second installation of the same schedule changes nothing. A launcher and megatron_ext.auto
    may both install the schedule of the environment: each patch used to be applied twice, and the
    gradients of a V's tied embeddings were summed twice."""
    with megatron_ext.install(schedule="zb-v") as handle:
        module: Any = sys.modules["megatron.core.distributed.finalize_model_grads"]
        once = module._allreduce_word_embedding_grads
        assert megatron_ext.install(schedule="zb-v") is handle
        assert module._allreduce_word_embedding_grads is once
        with pytest.raises(PatchError, match="zb-v is already installed in this process"):
            megatron_ext.install(schedule="zb-h1")
    assert not handle.is_in_force


def test_it_is_refused_once_a_model_exists() -> None:
    module = MegatronModule(SimpleNamespace())
    with pytest.raises(PatchError, match=r"MegatronModule.* has been built already"):
        megatron_ext.install(schedule="1f1b")
    del module
    megatron_ext.install(schedule="1f1b").undo()


def test_it_is_refused_when_a_reference_cannot_be_replaced() -> None:
    held = functools.partial(schedules.get_forward_backward_func)
    with pytest.raises(PatchError, match="get_forward_backward_func is held by a partial"):
        megatron_ext.install(schedule="1f1b")
    del held
    megatron_ext.install(schedule="1f1b").undo()


def test_unreachable_objects_do_not_prevent_an_installation() -> None:
    """Objects that only a garbage cycle refers to do not prevent an installation. Caught exceptions
    of one test used to keep such objects alive, so the ranks of the next test file did not start
    while the garbage collector was off."""

    def fail(*held: object) -> None:
        raise RuntimeError

    gc.disable()
    try:
        try:
            fail(
                functools.partial(schedules.get_forward_backward_func),
                MegatronModule(SimpleNamespace()),
            )
        except RuntimeError as error:
            cycle = [error]
            cycle.append(cycle)  # type: ignore[arg-type]
            del cycle
        megatron_ext.install(schedule="1f1b").undo()
    finally:
        gc.enable()


def test_an_unknown_megatron_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward_step() -> None: ...

    stock = schedules.get_forward_backward_func
    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.delenv(ALLOW_UNKNOWN, raising=False)  # the nightly run sets this variable
    with pytest.raises(PatchError, match="schedules:forward_step is not as in") as caught:
        megatron_ext.install(schedule="1f1b")
    assert schedules.get_forward_backward_func is stock
    (misfit,) = (misfit for misfit in diagnose(PipelineConfig()).misfits if misfit.unknown)
    assert misfit.unknown is not None
    assert (
        misfit.unknown.file == __file__ and "we rely on it: a forward pass of a stage" in misfit.why
    )
    assert misfit.why in str(caught.value)
    allowed = diagnose(PipelineConfig()).allowance
    assert allowed == misfit.unknown.entry and f"{ALLOW_UNKNOWN}={allowed}" in str(caught.value)
    monkeypatch.setenv(ALLOW_UNKNOWN, allowed)
    megatron_ext.install(schedule="1f1b").undo()


def test_a_fork_is_compared_with_the_upstream_that_it_is_nearest_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "megatron" / "core" / "pipeline_parallel" / "schedules.py"
    file.parent.mkdir(parents=True)
    file.write_text("# theirs\n\ndef forward_step():\n    return 1\n")
    code = compile(file.read_text(), file, "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    monkeypatch.setattr(schedules, "forward_step", namespace["forward_step"])
    monkeypatch.setattr(megatron.core, "__version__", "0.18.7+fork")

    def told() -> UnknownSource:
        (misfit,) = filter(None, (misfit.unknown for misfit in diagnose(PipelineConfig()).misfits))
        return misfit

    assert told().file == str(file) and told().lines == (3, 4)
    path = "megatron/core/pipeline_parallel/schedules.py"
    assert told().diff.startswith(f"git show core_v0.18.0:{path} | git diff --no-index - {file}")
    (tmp_path / ".git").mkdir()
    assert told().diff == f"git -C {tmp_path} diff core_v0.18.0 -- {path}"
    monkeypatch.setattr(megatron.core, "__version__", "0.21.0")
    assert told().diff == f"git -C {tmp_path} diff {UNTAGGED['0.20']} -- {path}"


def test_a_megatron_that_lacks_what_patches_import_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An installation is refused under a Megatron that lacks modules which our patches import, such
    as 0.17. On a GPU such a launch used to end in the traceback of an ImportError."""
    module = "megatron_ext.patches.megatron.training.arguments"
    monkeypatch.setitem(sys.modules, module, None)  # importing the module now fails
    with pytest.raises(PatchError, match=rf"flags: something .* import is missing: .*{module}"):
        megatron_ext.install(schedule="1f1b")
    states = {patch.feature: patch.state for patch in diagnose(PipelineConfig()).patches}
    assert states["flags"] == "does not fit" and states["schedule"] == "fits"


def test_doctor_reports_the_megatron_that_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` reports the Megatron that is imported. It used to report the version of an installed
    wheel although a checkout of another version came first on the path."""
    monkeypatch.setattr(megatron.core, "__version__", "9.9.9+0a1b2c3")
    reported = diagnose(PipelineConfig()).environment["megatron-core"]
    assert reported == f"9.9.9 ({Path(megatron.core.__file__).parent})"


def test_an_unknown_flag_is_refused_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron.training import arguments

    with megatron_ext.install(schedule="1f1b"):
        parser = arguments.add_megatron_arguments(argparse.ArgumentParser(usage="none"))
        with pytest.raises(SystemExit):
            parser.parse_args(["--pipeline-shedule-memory-limit=4", "--elsewhere", "3"])
    text = capsys.readouterr().err.strip()
    meant = "--pipeline-shedule-memory-limit: did you mean --pipeline-memory-limit?"
    assert text.endswith(f"--elsewhere 3; {meant}")


def test_a_pipeline_of_one_rank_is_refused() -> None:
    with (
        megatron_ext.install(schedule="1f1b"),
        pytest.raises(ValueError, match=r"needs a pipeline.*--pipeline-model-parallel-size"),
    ):
        schedules.get_forward_backward_func(pp_size=1)


def test_whole_backward_schedules_refuse_less() -> None:
    settings = SimpleNamespace(
        transformer_impl="inference_optimized",
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=None,
    )
    refuse(settings, choose("1f1b"))
    with pytest.raises(ValueError, match="--transformer-impl local"):
        refuse(settings, choose("zb-h1"))


@pytest.mark.parametrize(
    ("version", "splits"), [(None, False), ("2.7.9", False), ("2.8.0", True), ("3.0.0+abc", True)]
)
def test_transformer_engine_is_split_from_2_8_on(
    monkeypatch: pytest.MonkeyPatch, version: str | None, splits: bool
) -> None:
    def find(package: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    settings = SimpleNamespace(
        transformer_impl="transformer_engine",
        num_experts=4,
        moe_grouped_gemm=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=None,
    )
    targets = [patch.target for patch in needed_patches(PipelineConfig(schedule="zb-h1"))]
    assert any(target.startswith("transformer_engine") for target in targets) == splits
    if splits:
        refuse(settings, choose("zb-h1"))
    else:
        with pytest.raises(ValueError, match=r"install Transformer Engine 2\.8 or later"):
            refuse(settings, choose("zb-h1"))


def test_a_transformer_engine_that_cannot_be_imported_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A Transformer Engine that is installed but cannot be imported counts as absent. In a
    container with it, on a machine without the driver, Megatron continues with local layers, and
    our patches do the same."""
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.8.0")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    targets = [patch.target for patch in needed_patches(PipelineConfig(schedule="zb-h1"))]
    assert not any(target.startswith("transformer_engine") for target in targets)


def transformer_engine(**settings: object) -> SimpleNamespace:
    """Return Megatron's defaults with ``settings``."""
    defaults: dict[str, object] = {
        "transformer_impl": "transformer_engine",
        "gradient_accumulation_fusion": False,
        "fp8": None,
        "fp8_recipe": "delayed",
        "recompute_granularity": None,
    }
    return SimpleNamespace(**defaults | settings)


@pytest.mark.parametrize("rows", ["0F0,0F1,0B1,0B0", "0F0,0F1,0I0,0I1,0W1,0W0", "0F1,0F0,0B0,0B1"])
def test_weight_gradients_that_overwrite_come_first(rows: str) -> None:
    """With fused weight gradients, a schedule file is refused if a stage's first weight gradient is
    not that of its first forward pass. Transformer Engine overwrites the gradient for that
    microbatch and adds all others."""
    schedule = from_csv(rows, "mine.csv")
    fused = transformer_engine(gradient_accumulation_fusion=True)
    with pytest.raises(ValueError, match=r"mine\.csv: the first weight .* is (0B1|0W1|0B0)"):
        refuse_order(fused, schedule)
    refuse_order(transformer_engine(), schedule)


@pytest.mark.parametrize("rows", ["0F0,0F1,0B0,0B1", "0F1,0F0,0I1,0I0,0W1,0W0"])
def test_files_may_begin_with_any_microbatch(rows: str) -> None:
    everything = transformer_engine(
        gradient_accumulation_fusion=True, fp8="hybrid", recompute_granularity="full"
    )
    assert accepts(refuse_order, everything, from_csv(rows, "mine.csv"))
    swapped = re.sub(r"(?<=[BIW])\d", lambda found: str(1 - int(found[0])), rows)
    assert not accepts(refuse_order, everything, from_csv(swapped, "mine.csv"))


@pytest.mark.parametrize("rows", ["0F0,0F1,0B1,0B0", "0F1,0F0,0I0,0I1,0W0,0W1"])
def test_scales_for_recompute_are_taken_in_order(rows: str) -> None:
    """With FP8's delayed scaling and recompute, a schedule file is refused if its backward passes
    have another order than its forward passes. Transformer Engine queues the scales of forward
    passes, so each recomputed pass would use another microbatch's scales."""
    schedule = from_csv(rows, "mine.csv")
    settings: dict[str, object] = {"fp8": "e4m3", "recompute_granularity": "selective"}
    with pytest.raises(
        ValueError, match=r"mine\.csv: 0[BI]\d runs before the backward pass of 0F\d"
    ):
        refuse_order(transformer_engine(**settings), schedule)
    for other in (
        {"fp8": None},
        {"fp8_recipe": "tensorwise"},
        {"recompute_granularity": None},
        {"transformer_impl": "local"},
    ):
        refuse_order(transformer_engine(**settings | other), schedule)


def test_importing_the_package_imports_neither_torch_nor_megatron() -> None:
    code = "import megatron_ext, sys; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
