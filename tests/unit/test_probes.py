"""Adding something touches few files: probes that add a dummy to a copy of the package.

A GPU is probed in test_estimate.py, a refusal in tests/patches/test_refusals.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import megatron_ext

ROOT = Path(megatron_ext.__file__).parent

# By file, the text before which something is inserted, and that; of a new file all of it.
_KIND: dict[str, tuple[str, str]] = {
    "schedule/action.py": ("    SEND_F = ", '    DUMMY = "DUMMY"\n'),
    "schedule/kinds.py": (
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
    "schedule/transforms/dummy.py": (
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
    "schedule/build/build.py": (
        "    return replace(problem, costs=costs)\n\n\ndef _transformed",
        "    from megatron_ext.schedule.transforms.dummy import with_costs_of_dummies\n"
        "    costs = with_costs_of_dummies(costs)\n",
    ),
    "runtime/dummy.py": (
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
    "runtime/executor.py": (
        "    _Execution(program, transport.rank",
        "    from megatron_ext.runtime.dummy import Dummies\n    owners.append(Dummies())\n",
    ),
}
_ALSO = (
    "    for transform in transforms:\n        schedule = transform(",
    "    from megatron_ext.schedule.transforms.dummy import with_dummies\n"
    "    transforms.insert(transforms.index(communicate), with_dummies)\n",
)
_RUN = """
from pathlib import Path
from megatron_ext.runtime import executor
from megatron_ext.runtime.dummy import Dummies
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.build.build import build_program
from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Extras, Problem, Recompute
from megatron_ext.schedule.program.simulate import simulate
from megatron_ext.schedule.show.draw import COLOURS, draw

place = line(2)
costs = parse_costs("f=1,i=1,w=1", place)
extras = Extras(recompute=Recompute(first=1))
program = build_program(choose("1f1b"), Problem(place, 3, costs, extras=extras))
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


def test_a_kind_touches_six_files(tmp_path: Path) -> None:
    """Its member, its rule with cost, colour and legend, a transform, which is named, and a
    handler, whose owner is named. It touched 16: proof, simulation, memory and pictures had tables
    of their own."""
    package = tmp_path / "megatron_ext"
    shutil.copytree(ROOT, package, ignore=shutil.ignore_patterns("patches", "__pycache__"))
    assert len(_KIND) == 6
    for name, (before, inserted) in _KIND.items():
        file = package / name
        text = "" if not before else file.read_text()
        assert text.count(before) == 1 or not before, f"{name} has changed"
        file.write_text(inserted + text if not before else text.replace(before, inserted + before))
    build = package / "schedule/build/build.py"
    before, inserted = _ALSO
    assert build.read_text().count(before) == 1
    build.write_text(build.read_text().replace(before, inserted + before))
    run = subprocess.run(
        [sys.executable, "-c", _RUN],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    picture = (tmp_path / "picture.svg").read_text()
    assert "#123456" in picture and "dummy" in picture
