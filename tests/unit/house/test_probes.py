"""Tests that adding something touches few files: each adds a dummy to a copy of the repository.

The touched files, with pages and tests, are listed in docs/architecture.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.probes import Edit, check_listed, touched

# Edits that add a kind of action: of the package, then of pages and tests.
_KIND: tuple[Edit, ...] = (
    ("schedule/action.py", "    SEND_F = ", '    DUMMY = "D"\n'),
    (
        "schedule/kinds.py",
        "    Rule(\n        Kind.SEND_F,",
        """    Rule(
        Kind.DUMMY,
        "dummy pass",
        Lane.COMPUTE,
        needs=(Need((Kind.FORWARD,)),),
        option="recompute",
        cost=Cost.PASS,
        colour="#123456",
        legend="dummy",
    ),
""",
    ),
    (
        "compile/transforms/dummy.py",
        "",
        """from dataclasses import replace
from megatron_ext.schedule.action import Action, Kind

def with_dummies(schedule, problem):
    def after(action):
        is_forward = action.kind is Kind.FORWARD
        return [action, Action(action.stage, Kind.DUMMY, action.microbatch)][: 1 + is_forward]
    rows = tuple(tuple(a for action in row for a in after(action)) for row in schedule.rows)
    return replace(schedule, rows=rows)

def with_costs_of_dummies(costs):
    return costs.with_passes(seconds={**costs.seconds, Kind.DUMMY: (7.0,) * costs.stages})
""",
    ),
    (
        "compile/build.py",
        "    return problem\n\n\ndef _transformed",
        "    from megatron_ext.compile.transforms.dummy import with_costs_of_dummies\n"
        "    if problem.options.requests('recompute'):\n"
        "        problem = replace(problem, costs=with_costs_of_dummies(problem.costs))\n",
    ),
    (
        "runtime/dummy.py",
        "",
        """from megatron_ext.runtime.owner import Owner
from megatron_ext.schedule.action import Kind

class Dummies(Owner):
    def __init__(self):
        self.run = []
    def handlers(self):
        return {Kind.DUMMY: self.run.append}
""",
    ),
    (
        "runtime/executor.py",
        "    _Execution(program, transport.rank",
        "    from megatron_ext.runtime.dummy import Dummies\n    owners.append(Dummies())\n",
    ),
    (
        "compile/build.py",
        "    for transform in transforms:\n        schedule = transform(",
        "    from megatron_ext.compile.transforms.dummy import with_dummies\n"
        "    if problem.options.requests('recompute'):\n"
        "        transforms.insert(transforms.index(communicate), with_dummies)\n",
    ),
)
_LISTS_OF_KINDS: tuple[Edit, ...] = (
    (
        "docs/your-own-schedule.md",
        "\n[Other kinds](architecture.md#actions-of-a-row)",
        "| `Kind.DUMMY` | `D` | dummy pass |\n",
    ),
    (
        "tests/unit/schedule/test_action.py",
        '    Kind.SEND_F: "3SEND_F7",',
        '    Kind.DUMMY: "3D7",\n',
    ),
    (
        "tests/unit/schedule/test_csv.py",
        ']\n\n\n@pytest.mark.parametrize(\n    ("text", "mess',
        ', "D"',
    ),
)
_RUN_KIND = """
from pathlib import Path
from megatron_ext.runtime import executor
from megatron_ext.runtime.dummy import Dummies
from megatron_ext.schedule.action import Kind
from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import ScheduleOptions, Problem, Recompute
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.viz.draw import COLOURS, draw

place = line(2)
costs = parse_costs("f=1,i=1,w=1", place)
options = ScheduleOptions(recompute=Recompute(first=1))
program = build_program(choose("1f1b"), Problem(place, 3, costs, options=options))
dummies = [a for row in program.schedule.rows for a in row if a.kind is Kind.DUMMY]
assert len(dummies) == 6, dummies
costs = program.problem.costs
assert costs.of(dummies[0]) == 7 and costs.per_rank(place).of(dummies[1]) == 7
timeline = simulate(program, costs)
assert timeline.makespan >= 3 * 7 + 9
assert COLOURS[Kind.DUMMY] == "#123456"
draw([timeline], Path("picture.svg"))

class Others(executor.Owner):
    def handlers(self):
        return {kind: lambda action: None for kind in Kind if kind is not Kind.DUMMY}

class Whole:
    def gradients_complete(self): pass
    def __getattr__(self, name): return lambda *given: None

class Quiet:
    interruption = None
    def __getattr__(self, name): return lambda *given: None

made = Dummies()
stages = {stage: Whole() for stage in range(2)}
executor._Execution(program, 0, stages, Quiet(), [Others(), made], None).run_row()
assert [a.microbatch for a in made.run] == [0, 1, 2], made.run
"""


# Edits that add a setting, which computes all weight gradients last.
_FLAG: tuple[Edit, ...] = (
    (
        "config.py",
        "    report_split: bool = field(",
        '    late_weights: bool = field(default=False, metadata=DECLARED["late_weights"])\n',
    ),
    (
        "schedule/problem.py",
        "    pairs: bool = field(default=False",
        '    late_weights: bool = field(default=False, metadata={"phrase": "late weights"})\n',
    ),
    (
        "schedule/problem.py",
        '    Conflict(("pairs", "slices")',
        '    Conflict(("late_weights", "recompute"), "this is a dummy"),\n',
    ),
    ("features/late_weights/__init__.py", "", ""),
    (
        "features/late_weights/settings.py",
        "",
        """from megatron_ext.base.setting import FeatureSettings, switch

LATE_WEIGHTS_SETTINGS = FeatureSettings(
    {"late_weights": switch(help="Compute weight gradients last.")}
)
""",
    ),
    (
        "features/late_weights/schedule.py",
        "",
        """from dataclasses import replace
from megatron_ext.compile.build_hooks import BuildHooks
from megatron_ext.schedule.action import Kind

class LateWeightsBuild(BuildHooks):
    def is_on(self, problem):
        return problem.options.late_weights

    def without(self, problem):
        return problem.with_options(late_weights=False)

    def before_messages(self, problem):
        return () if problem.forward_only else (late_weights,)

def late_weights(schedule, problem):
    rows = (sorted(row, key=lambda a: a.kind is Kind.BACKWARD_WEIGHT) for row in schedule.rows)
    return replace(schedule, rows=tuple(map(tuple, rows)))
""",
    ),
    (
        "features/late_weights/refusals.py",
        "",
        """from megatron_ext.adapter.handled_settings.feature_refusals import FeatureRefusals
from megatron_ext.adapter.handled_settings.refused_setting import RefusalGroup, by_option, drop
from megatron_ext.schedule.problem import ScheduleOptions

LATE_WEIGHTS_REFUSALS = FeatureRefusals(
    lambda config: config.late_weights,
    groups=(
        RefusalGroup(
            "late weights refusals",
            (drop("moe_dummy", "this is a dummy"),),
            by_option("late_weights"),
            options=ScheduleOptions(late_weights=True),
        ),
    ),
)
""",
    ),
    *(
        (
            f"{level}.py",
            "from megatron_ext.features.offload",
            f"from megatron_ext.features.late_weights.{part} import {name}\n",
        )
        for level, part, name in (
            ("compile/feature_settings", "settings", "LATE_WEIGHTS_SETTINGS"),
            ("compile/features", "schedule", "LateWeightsBuild"),
            ("adapter/refusals", "refusals", "LATE_WEIGHTS_REFUSALS"),
        )
    ),
    ("compile/feature_settings.py", "    OFFLOAD_SETTINGS,\n", "    LATE_WEIGHTS_SETTINGS,\n"),
    ("compile/features.py", "    OverlapBuild(),\n", "    LateWeightsBuild(),\n"),
    (
        "adapter/refusals.py",
        '    RefusalGroup(\n        "slices refusals"',
        "    *LATE_WEIGHTS_REFUSALS.groups,\n",
    ),
)
_LISTS_OF_FLAGS: tuple[Edit, ...] = (
    (
        "docs/comparison.md",
        "| `--enable-zb-runtime` alone |",
        "| `--dummy` | `--pipeline-late-weights` |\n",
    ),
    (
        "docs/compatibility.md",
        "## Passes in pairs",
        "<!-- late weights refusals: written by a test -->\n"
        "<!-- end of late weights refusals -->\n",
    ),
    (
        "tests/unit/launch/test_auto.py",
        '"post_validation", "activation_offload", "race", "race_then"}',
        '"late_weights", ',
    ),
    ("tests/unit/schedule/test_conflicts.py", "    pairs=True,\n", "    late_weights=True,\n"),
    ("tests/unit/schedule/test_conflicts.py", '        "pairing of', '        "late weights",\n'),
)
_RUN_FLAG = """
import argparse
import json
from types import SimpleNamespace
from typer.testing import CliRunner
from megatron_ext.adapter.compatibility import refuse
from megatron_ext.features.race.adapter.fingerprint import _settings
from megatron_ext.cli import app
from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.action import Kind
from megatron_ext.compile.build import build_program
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import ScheduleOptions
from megatron_ext.viz.page.run import title_of
from megatron_ext.written_settings import add_flags, from_argv, from_environment

def refused(call, *given):
    try:
        call(*given)
    except ValueError as error:
        return str(error)

PASSES = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
flags = ["--pipeline-schedule", "zb-h1", "--pipeline-late-weights"]
assert "--pipeline-late-weights" in add_flags(argparse.ArgumentParser()).format_help()
config = from_argv(flags)
variables = {"MEGATRON_EXT_SCHEDULE": "zb-h1", "MEGATRON_EXT_LATE_WEIGHTS": "1"}
keyword = PipelineConfig.parse(schedule="zb-h1", late_weights=True)  # as install does
assert config == from_environment(variables) == keyword and config.options.late_weights

why = refused(from_argv, [*flags, "--pipeline-recompute", "first:1"])
assert "--pipeline-late-weights" in why and "this is a dummy" in why, why
place = line(2)
costs = parse_costs("f=1,i=1,w=1", place)
settings = SimpleNamespace(
    pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None,
    transformer_impl="local", moe_dummy=True,
)
refuse(settings, config.resolved_spec)
why = refused(refuse, settings, config.resolved_spec, config.options)
assert why.startswith("--pipeline-late-weights does not go with moe_dummy=True"), why

def last(program):
    rows = ([a.kind for a in row if a.kind in PASSES] for row in program.schedule.rows)
    return {kind for row in rows for kind in row[-4:]}

def built(config):
    return build_program(config.resolved_spec, config.problem(place, 4, costs))

assert last(built(config)) == {Kind.BACKWARD_WEIGHT}
assert last(built(from_argv(flags[:2]))) != {Kind.BACKWARD_WEIGHT}
assert title_of("zb-h1", config.options) == "zb-h1, late weights"
assert _settings(config) == ["--pipeline-late-weights"]

def run(*words):
    return CliRunner().invoke(app, [*words, "--late-weights"])

told = run("simulate", "zb-h1", "--pp", "2", "-m", "4")
assert told.exit_code == 0 and "late weights" in told.output, told.output
told = run("simulate", "zb-h1", "--pp", "2", "-m", "4", "--recompute", "first:1")
assert told.exit_code and "does not go with --recompute first:1" in told.output
model = "layers=4,hidden=1024,heads=8,sequence=1024,vocabulary=32000"
for job in (("pp=2,m=2",), (f"{model},pp=2,m=2", "--gpu", "h100")):
    told = CliRunner().invoke(app, ["plan", *job, "--pipeline-late-weights", "--json"])
    assert told.exit_code == 0, told.output
    assert "--pipeline-late-weights" in json.loads(told.stdout)["plan"]["candidates"][0]["flags"]
"""


_GPU: tuple[Edit, ...] = (
    (
        "cost_model/gpus.toml",
        "",
        """
[d1000]
bf16 = 1e15
fp8 = 2e15
fp4 = 0
bandwidth = 4e12
memory_gib = 99
peers = 450e9
domain = 8
network = 50e9
host = 64e9
sms = 100
matrices = 0.8
source = "https://dummy/"
""",
    ),
)
_RUN_GPU = """
from megatron_ext.cost_model.gpus import GPUS, gpu_named, parse_gpu
assert parse_gpu("D1000") is gpu_named("NVIDIA D1000 99GB") is GPUS["d1000"]
try:
    parse_gpu("d2000")
except ValueError as error:
    assert "mi355x, d1000, or" in str(error), error
"""

_REFUSAL: tuple[Edit, ...] = (
    (
        "adapter/refusals.py",
        '    drop("moe_enable_routing_replay", "a replay is of whole',
        '    drop("moe_dummy", "this is a dummy"),\n',
    ),
)
_RUN_REFUSAL = """
from types import SimpleNamespace
from megatron_ext.adapter.compatibility import refuse
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.problem import ScheduleOptions
from megatron_ext.schedule.slices import Slices
settings = SimpleNamespace(
    pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=None,
    transformer_impl="local", moe_dummy=True,
)
refuse(settings, choose("1f1b"))
try:
    refuse(settings, choose("1f1b"), ScheduleOptions(slices=Slices(4)))
except ValueError as error:
    assert str(error).endswith("does not go with moe_dummy=True: drop --moe-dummy: this is a dummy")
else:
    raise AssertionError("accepted")
"""


def of_package(edits: tuple[Edit, ...]) -> tuple[Edit, ...]:
    return tuple((f"megatron_ext/{name}", before, inserted) for name, before, inserted in edits)


def test_a_kind_touches_ten_files(tmp_path: Path) -> None:
    """A new kind of action touches ten files: the enum of kinds, the table of their rules, the
    transform that inserts the action and the build that calls it, the handler and the executor that
    calls it, a page, two tests and a record. It used to touch 16 files of the package, when proof,
    simulation, memory account and pictures had tables of their own."""
    edits = of_package(_KIND) + _LISTS_OF_KINDS
    files = touched(edits, _RUN_KIND, tmp_path)
    picture = (tmp_path / "picture.svg").read_text()
    assert "#123456" in picture and "dummy" in picture
    assert len(files) == 10
    check_listed("a kind", files, edits)


@pytest.mark.search
def test_a_flag_that_changes_a_schedule_touches_14_files(tmp_path: Path) -> None:
    """A new setting that changes a schedule touches 14 files outside its feature's folder. Six are
    in the package: the config with its field, the problem with its option, the lists of three
    levels, and `install`, whose keyword a command writes. The others are pages, tests and records.
    It used to touch 33 files of the package."""
    edits = of_package(_FLAG) + _LISTS_OF_FLAGS
    files = touched(edits, _RUN_FLAG, tmp_path)
    assert len([file for file in files if "features/late_weights" not in file]) == 14
    check_listed("a setting", files, edits)


def test_a_gpu_touches_two_files(tmp_path: Path) -> None:
    """A new GPU touches two files: the data file, and the page that is written from it. The names,
    plans and errors of commands come from the data file. A new GPU used to touch five files of the
    package."""
    files = touched(of_package(_GPU), _RUN_GPU, tmp_path)
    assert len(files) == 2
    assert "| `d1000` | 1,000 |" in (tmp_path / "docs" / "estimated-costs.md").read_text()
    check_listed("a GPU", files, of_package(_GPU))


def test_a_refusal_touches_three_files(tmp_path: Path) -> None:
    """A new refusal touches three files: the one that declares it in a line, and a page and a
    record that are written from that line. A new refusal used to touch four files of the package,
    and a new feature with refusals six."""
    files = touched(of_package(_REFUSAL), _RUN_REFUSAL, tmp_path)
    assert len(files) == 3
    record = (tmp_path / "tests" / "records" / "refusals.txt").read_text()
    assert "slices refusals: moe_dummy\n    whatever is true, by all\n" in record
    check_listed("a refusal", files, of_package(_REFUSAL))
