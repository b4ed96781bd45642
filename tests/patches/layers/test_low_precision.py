"""Tests of the state that Transformer Engine's FP8 and FP4 recipes share between microbatches,
under reordered and split passes.

Layers, recipes and state are real; kernels are torch's (`tests.helpers.quantization_on_cpu`). The
passes of a rank run one by one, in the order of its row of a program, on data that do not depend on
the order. Each stage must equal stock's order in outputs, gradients, weights after two steps,
scales, histories and copies of weights, and in the sequence in which they are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext.compile.build import build_program
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.patches.transformer_engine.pytorch.module import _common
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from tests.helpers import quantization_on_cpu as quantization
from tests.helpers import transformer_engine_on_cpu as on_cpu
from tests.helpers.combinations import IS_NIGHT, at_night, nightly
from tests.helpers.documents import check_written, table
from tests.helpers.ranks import run_ranks, values

ROWS, WIDTH = 32, 64
MICROBATCHES = 4
STEPS = 2

Te = Any  # the module transformer_engine.pytorch


@dataclass(frozen=True)
class Precision:
    """Recipe of Transformer Engine: its class, and the options it is created with."""

    recipe: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> Any:
        from transformer_engine.common import recipe

        return getattr(recipe, self.recipe)(**self.options)


PRECISIONS = {
    "delayed": Precision(
        "DelayedScaling", {"amax_history_len": 1, "amax_compute_algo": "most_recent"}
    ),
    "delayed, max": Precision(
        "DelayedScaling", {"amax_history_len": 4, "amax_compute_algo": "max"}
    ),
    "tensorwise": Precision("Float8CurrentScaling"),
    "blockwise": Precision("Float8BlockScaling"),
    "mxfp8": Precision("MXFP8BlockScaling"),
    "nvfp4": Precision("NVFP4BlockScaling"),
}


# ---- the passes of a rank


@dataclass
class Stage:
    """Results of a stage, and the scales with which its passes quantized: forward passes, backward
    passes and evaluations, each in their order."""

    made: list[Tensor] = field(default_factory=list)
    read: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))


class Rank:
    """Rank that runs the passes of its row on its stages, step by step."""

    def __init__(self, te: Te, row: Sequence[Action], case: Case) -> None:
        self._te = te
        self._case = case
        self._recipe = case.precision.make()
        self._row = row
        self._splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in row)
        self.stages: dict[int, Stage] = defaultdict(Stage)
        self._layers = {action.stage: case.layers(te, action.stage) for action in row}
        self._outputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._running: tuple[int, str] | None = None  # the stage and the pass that run

    def run(self) -> dict[int, Stage]:
        importlib.import_module("transformer_engine.pytorch.fp8").FP8GlobalStateManager.reset()
        quantization.watchers[:] = [self._watch]
        try:
            for step in range(STEPS):
                self._train(step)
                if self._case.evaluates:
                    self._evaluate(step)
        finally:
            quantization.watchers.clear()
        for number, layers in self._layers.items():
            for layer in layers:
                self.stages[number].made += _state(layer)
        return dict(self.stages)

    def _train(self, step: int) -> None:
        torch.manual_seed(step)  # NVFP4 rounds gradients randomly
        parameters = {
            number: [parameter for layer in layers for parameter in layer.parameters()]
            for number, layers in self._layers.items()
        }
        for parameter in (p for several in parameters.values() for p in several):
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        begun: set[int] = set()
        queue.splitting = self._splits
        for action in self._row:
            self._pass(action, step, begun)
        assert not len(queue)
        queue.splitting = False
        for number, several in parameters.items():
            for parameter in several:
                self.stages[number].made.append(_stepped(parameter))

    def _pass(self, action: Action, step: int, begun: set[int]) -> None:
        stage, kind, microbatch = action
        key = stage, microbatch
        made = self.stages[stage].made
        if kind is Kind.FORWARD:
            self._running = stage, f"F{microbatch}"
            x = data(stage, microbatch, step)[0].requires_grad_()
            y = self._forward(stage, x, is_first=stage not in begun)
            begun.add(stage)
            self._outputs[key] = x, y
            made.append(y.detach().clone())
        elif kind is Kind.BACKWARD_WEIGHT:
            self._running = None  # W quantizes nothing
            queue.run(*key)
        else:
            self._running = stage, f"I{microbatch}"
            x, y = self._outputs.pop(key)
            splits = kind is Kind.BACKWARD_INPUT
            with queue.collecting(*key) if splits else contextlib.nullcontext():
                y.backward(data(stage, microbatch, step)[1])
            assert x.grad is not None
            made.append(x.grad)

    def _forward(self, stage: int, x: Tensor, is_first: bool) -> Tensor:
        """Run the layers as Megatron's TransformerBlock does: in one context for all layers under
        delayed scaling, in one for each layer under other recipes."""
        whole = self._recipe.delayed()
        with self._autocast() if whole else contextlib.nullcontext():
            for layer in self._layers[stage]:
                with contextlib.nullcontext() if whole else self._autocast():
                    x = self._layer(layer, x, is_first)
        return x

    def _layer(self, layer: torch.nn.Module, x: Tensor, is_first: bool) -> Tensor:
        # Only the first run of the layer gets the flag ``is_first``, since a recomputed run is not
        # the first one of its microbatch.
        firsts = itertools.chain([is_first], itertools.repeat(False))

        def forward(x: Tensor) -> Tensor:
            made: Tensor = layer(x, *splits_of(layer), is_first_microbatch=next(firsts))
            return made

        if self._case.recomputes and torch.is_grad_enabled():
            return self._te.checkpoint(forward, x)
        return forward(x)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        return self._te.fp8_autocast(enabled=True, fp8_recipe=self._recipe)

    def _evaluate(self, step: int) -> None:
        with torch.no_grad():
            for microbatch in range(2):
                for number in self._layers:
                    self._running = number, f"evaluation {microbatch}"
                    x, _ = data(number, microbatch, step + 1)
                    self._forward(number, 3 * x, is_first=microbatch == 0)

    def _watch(self, quantizer: Any, tensor: Tensor) -> None:
        assert self._running is not None, "a W pass quantises"
        stage, running = self._running
        kind = type(quantizer).__name__
        # Only quantizers of the class Float8Quantizer have a scale.
        scale = quantizer.scale.item() if kind == "Float8Quantizer" else None
        event = (kind, *tensor.shape, scale)
        self.stages[stage].read[running[0]].append((running, *event))


def _stepped(parameter: Any) -> Tensor:
    """Make a step of plain gradient descent. The gradient of a bias or of a norm is in
    ``.grad``."""
    gradient = parameter.main_grad if parameter.grad is None else parameter.grad
    with torch.no_grad():
        parameter.sub_(1e-3 * gradient)
    parameter.grad = None
    return parameter.detach().clone()


Layers = Callable[[Te, int], list[torch.nn.Module]]


def linears(te: Te, stage: int) -> list[torch.nn.Module]:
    torch.manual_seed(stage)
    options = {"device": "cpu", "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
    return [te.Linear(WIDTH, WIDTH, **options), te.LayerNormLinear(WIDTH, WIDTH, **options)]


def experts(te: Te, stage: int) -> list[torch.nn.Module]:
    torch.manual_seed(stage)
    options = {"device": "cpu", "params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
    return [te.GroupedLinear(2, WIDTH, WIDTH, **options)]


def splits_of(layer: torch.nn.Module) -> tuple[Any, ...]:
    return ([ROWS // 2, ROWS // 2],) if hasattr(layer, "num_gemms") else ()


def data(stage: int, microbatch: int, step: int) -> tuple[Tensor, Tensor]:
    """Return x and dy, which are the same in every order of passes, and differ in size between
    microbatches."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * stage + microbatch)
    x, dy = (torch.randn(ROWS, WIDTH, generator=generator) for _ in "12")
    size = 1 + 5 * ((2 * microbatch + stage) % 3)
    return (size * x).bfloat16(), (dy / size).bfloat16()


def _state(layer: Any) -> list[Tensor]:
    """Return scales and amax histories of a layer, and its stored copies of weights."""
    states = [layer.fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd")]
    named = [getattr(s, name, None) for s in states for name in ("scale", "amax_history")]
    copies = [quantization.operand(kept, True) for kept in layer._fp8_workspaces.values()]
    return [tensor.clone() for tensor in (*named, *copies) if tensor is not None]


# ---- comparisons with stock's order


@dataclass(frozen=True)
class Case:
    precision: Precision
    layers: Layers = linears
    evaluates: bool = False
    recomputes: bool = False


@functools.cache
def rows(schedule: str, ranks: int) -> tuple[tuple[Action, ...], ...]:
    resolved = choose(schedule)
    placement = resolved.place(ranks)
    problem = Problem(placement, MICROBATCHES, uniform(placement, 1, 1, 1, 0))
    return build_program(resolved, problem).schedule.compute_rows


def run(te: Te, case: Case, schedule: str, ranks: int) -> dict[int, Stage]:
    """Return the results of all stages under ``schedule``."""
    made: dict[int, Stage] = {}
    for row in rows(schedule, ranks):
        made |= Rank(te, row, case).run()
    return made


LINE = (("zb-h1", 2), ("1f1b", 2))
AHEAD = (("zb-2p", 2), ("1f1b", 2))  # zb-2p has another order of F and I than stock
LOOP = (("interleaved-zb", 2), ("interleaved", 2))
V = (("zb-v", 2), ("1f1b", 4))


def is_stocks(te: Te, case: Case, pair: tuple[tuple[str, int], tuple[str, int]]) -> bool:
    """Return whether all stages have the same results under the first schedule as under the second,
    which stands for Megatron's."""
    ours, stock = (run(te, case, *schedule) for schedule in pair)
    assert ours.keys() == stock.keys()
    alike = True
    for number, expected in stock.items():
        assert expected.read["F"] and expected.read["I"]
        assert all(tensor.count_nonzero() for tensor in expected.made[:4]), "nothing is tested"
        alike &= ours[number].read == expected.read
        alike &= _as_bytes(ours[number].made) == _as_bytes(expected.made)
    return alike


def _as_bytes(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return the tensors as sorted bytes, to compare passes in any order."""
    return sorted(tensor.float().numpy().tobytes() for tensor in tensors)


CASES: dict[str, Callable[[Te], None]] = {}
NIGHTLY: set[str] = set()


def case_for(
    *names: str, nightly: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register ``function(te, precision)`` as cases for the named precisions, those in ``nightly``
    at night."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for name in (*names, *nightly):
            CASES[f"{function.__name__}-{name}"] = functools.partial(_checked, function, name)
        NIGHTLY.update(f"{function.__name__}-{name}" for name in nightly)
        return function

    return register


def _checked(function: Callable[[Te, str], None], name: str, te: Te) -> None:
    function(te, name)


WITHOUT_STATE = ("tensorwise", "blockwise", "mxfp8")


@case_for(*PRECISIONS)
def one_stage_a_rank(te: Te, name: str) -> None:
    assert is_stocks(te, Case(PRECISIONS[name], evaluates=True), LINE)


@case_for("delayed, max", "nvfp4", nightly=("delayed", *WITHOUT_STATE))
def a_loop_beside_megatrons_loop(te: Te, name: str) -> None:
    assert is_stocks(te, Case(PRECISIONS[name], evaluates=True), LOOP)


@case_for("mxfp8", nightly=("tensorwise", "blockwise"))
def a_v_beside_a_line(te: Te, name: str) -> None:
    assert is_stocks(te, Case(PRECISIONS[name], evaluates=True), V)


@case_for("delayed")
def a_v_beside_a_line_until_an_evaluation(te: Te, name: str) -> None:
    """A V equals stock under delayed scaling until an evaluation runs. The evaluation leaves its
    amaxes, and the next forward pass on the rank, of either of its stages, computes scales from
    them; the first pass of the other stage then has these scales already."""
    assert is_stocks(te, Case(PRECISIONS[name]), V)
    assert not is_stocks(te, Case(PRECISIONS[name], evaluates=True), V)


@case_for("delayed, max")
def a_v_s_history_is_of_all_its_passes(te: Te, name: str) -> None:
    """A V differs from stock if scales depend on a history of amaxes, because the length of that
    history is counted in passes of the rank, which has two stages on a V."""
    assert not is_stocks(te, Case(PRECISIONS[name]), V)


@case_for("nvfp4")
def a_v_rounds_by_other_chances(te: Te, name: str) -> None:
    """A V differs from stock under NVFP4 with stochastic rounding, whose random numbers are drawn
    in the order of the rank's backward passes. With rounding to nearest a V equals stock."""
    assert not is_stocks(te, Case(PRECISIONS[name]), V)
    nearest = dataclasses.replace(PRECISIONS[name], options={"disable_stochastic_rounding": True})
    assert is_stocks(te, Case(nearest), V)


@case_for("delayed")
def a_recompute_leaves_scales_alone(te: Te, name: str) -> None:
    for pair in (AHEAD, V, *at_night(LINE, LOOP)):
        assert is_stocks(te, Case(PRECISIONS[name], recomputes=True), pair)


@case_for("delayed, max")
def a_recompute_is_a_pass_of_the_history(te: Te, name: str) -> None:
    """A recomputed forward pass advances the amax history of the forward passes. So with recompute
    a schedule equals stock only if F and I have stock's order."""
    case = Case(PRECISIONS[name], recomputes=True)
    assert is_stocks(te, Case(PRECISIONS[name]), AHEAD)
    assert not is_stocks(te, case, AHEAD)
    assert all(is_stocks(te, case, pair) for pair in (LINE, *at_night(LOOP)))


@case_for("mxfp8", nightly=[name for name in PRECISIONS if name != "mxfp8"])
def experts_are_stocks(te: Te, name: str) -> None:
    assert is_stocks(te, Case(PRECISIONS[name], layers=experts), LINE)


# compute capabilities: GEMMs of Hopper require transposed FP8 operands, those of Blackwell do not
HOPPER, BLACKWELL = (9, 0), (10, 0)


@functools.cache
def outcomes(version: str, capability: tuple[int, int]) -> dict[str, str]:
    """Return how each case ended, by its name: an empty text, or the traceback."""
    folder = on_cpu.fetch(version)

    def on_rank(rank: int) -> dict[str, str]:
        te = on_cpu.load(folder, capability)
        apply([patch for patch in cpu.patches() if patch.target.startswith("torch")])
        apply(_common.patches(PipelineConfig(schedule="zb-h1")))
        parallel_state.initialize_model_parallel()
        return {
            name: _outcome(check, te)
            for name, check in CASES.items()
            if IS_NIGHT or name not in NIGHTLY
        }

    (texts,) = values(run_ranks(1, on_rank))
    return texts


def _outcome(check: Callable[[Te], None], te: Te) -> str:
    try:
        check(te)
    except BaseException:
        return traceback.format_exc()
    finally:
        queue.clear()
    return ""


PLACEMENTS = {"one_stage": "line", "experts": "line", "a_loop": "loop", "a_v": "v"}
PUBLIC = {  # names of the recipes in public configurations
    "delayed": "fp8_delayed",
    "tensorwise": "fp8_cs",
    "blockwise": "fp8_sc",
    "mxfp8": "fp8_mx",
    "nvfp4": "nvfp4",
}


def marks(case: str) -> list[pytest.MarkDecorator]:
    """Return the marks of ``case``, a name in `CASES`: whether it runs at night, and the public
    recipes that it covers."""
    function, _, precision = case.partition("-")
    marks = [nightly("of these recipes no pass reads what another has left")] * (case in NIGHTLY)
    placements = tuple(kind for word, kind in PLACEMENTS.items() if function.startswith(word))
    if precision in PUBLIC and placements:
        marks.append(pytest.mark.covers("B", placements, precision=PUBLIC[precision]))
    return marks


RUNS = [
    pytest.param(name, version, capability, marks=marks(name))
    for version, capability in (
        (on_cpu.VERSIONS[-1], BLACKWELL),
        *at_night(*((version, HOPPER) for version in on_cpu.VERSIONS)),
    )
    for name in CASES
    if capability == BLACKWELL or not name.endswith(("mxfp8", "nvfp4"))
]


@pytest.mark.parametrize(("name", "version", "capability"), RUNS)
def test_with(name: str, version: str, capability: tuple[int, int]) -> None:
    error = outcomes(version, capability)[name]
    assert not error, f"Transformer Engine {version}:\n{error}"


BITWISE = "bitwise"
# Rows of docs/compatibility.md: for each recipe the statements of the row. The cases above test
# these statements.
STATEMENTS: dict[str, tuple[str, ...]] = {
    "`--fp8-recipe delayed`, amax `most_recent` (Megatron's default)": (
        BITWISE,
        BITWISE,
        "bitwise until an evaluation (1)",
    ),
    "`--fp8-recipe delayed`, amax `max` of a history": (
        "bitwise; with recompute, where F and I have stock's order, as zb-h1's (2)",
        BITWISE,
        "other scales (3)",
    ),
    "`--fp8-recipe tensorwise`": (BITWISE,) * 3,
    "`--fp8-recipe blockwise`": (BITWISE,) * 3,
    "`--fp8-recipe mxfp8`": (BITWISE,) * 3,
    "`--fp4-format e2m1`, NVFP4": (BITWISE, BITWISE, "bitwise without stochastic rounding (4)"),
}
SHOWN_BY = {
    "bitwise until an evaluation (1)": "a_v_beside_a_line_until_an_evaluation",
    "bitwise; with recompute, where F and I have stock's order, as zb-h1's (2)": (
        "a_recompute_is_a_pass_of_the_history"
    ),
    "other scales (3)": "a_v_s_history_is_of_all_its_passes",
    "bitwise without stochastic rounding (4)": "a_v_rounds_by_other_chances",
}
WHERE = ("one_stage_a_rank", "a_loop_beside_megatrons_loop", "a_v_beside_a_line")


def test_the_docs_tell_what_each_recipe_keeps() -> None:
    for name, statements in zip(PRECISIONS, STATEMENTS.values(), strict=True):
        for where, statement in zip(WHERE, statements, strict=True):
            assert f"{SHOWN_BY.get(statement, where)}-{name}" in CASES
    head = ["", "one stage a rank", "`interleaved-zb` beside Megatron's loop", "a V beside a line"]
    check_written("low precision", table(head, [[k, *v] for k, v in STATEMENTS.items()]))
