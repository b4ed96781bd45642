"""Tests of a machine's factors (measured over estimated seconds of its operations), which are
measured at one size and used at others.

The machine is emulated: an operation takes its estimated seconds, multiplied by a known factor.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.measured.file import as_data, load_measured
from megatron_ext.cost_model.measured.layer_costs import Basis, layer_costs
from megatron_ext.cost_model.measured.machine_factors import (
    GroupedShape,
    MachineFactors,
    ProductShape,
)
from megatron_ext.cost_model.measured.scale import Measured, Scale
from megatron_ext.cost_model.measured.timed_operations import (
    GATHERED,
    AttentionShape,
    timed_attention,
    timed_collectives,
    timed_grouped,
    timed_products,
)
from megatron_ext.cost_model.measured_costs import Machine
from megatron_ext.cost_model.model import Model, stages_of
from megatron_ext.cost_model.operations.operation import (
    Engine,
    Exchange,
    Group,
    Operation,
    Passes,
    linear,
)
from megatron_ext.cost_model.operations.parts import part_of
from megatron_ext.cost_model.rates import Rates
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import load_costs, save_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem

GPU = "NVIDIA H100 80GB HBM3"
VERSIONS = ("torch 2.11.0", "CUDA 13.0", "NCCL 2.29.2")
MODEL = Model(
    layers=("*-",) * 16,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    ffn_hidden_size=14336,
    vocabulary=0,
    gated_linear_unit=True,
)
EXPERTS = replace(
    MODEL,
    layers=("*E",) * 16,
    num_experts=64,
    moe_router_topk=4,
    moe_ffn_hidden_size=2048,
)
RUN = Execution(sequence=8192, tensor_parallel=2)
RUN_OF_EXPERTS = replace(RUN, expert_parallel=8)
SHEET = GPUS["h100"].rates()


@dataclass(frozen=True)
class Emulated(MachineFactors):
    """Emulated machine on which products with a short side, attention of few heads, and short
    collectives are slow."""

    def of_product(self, shape: ProductShape) -> float:
        return 1.1 if min(shape) >= 2048 else 1.8

    def of_grouped(self, shape: GroupedShape) -> float:
        return 1.2 if shape[0] >= 2048 else 2.0

    def of_attention(self, flops: float, moved: float) -> tuple[float, float]:
        return (1.1, 1.2) if moved > 2**26 else (1.5, 1.9)

    def of_gather(self, size: float) -> float:
        return 1.3 if size >= 8 * 2**20 else 6.0

    def of_exchange(self, size: float) -> float:
        return 1.4 if size >= 8 * 2**20 else 5.0


EMULATED = Emulated(GPU, VERSIONS, "bf16")
TRUE = replace(SHEET, factors=EMULATED, measured=Measured((), others=Scale()))


def product_seconds(shape: ProductShape) -> float:
    rows, columns, depth = shape
    return TRUE.seconds_of(linear("product", rows, depth, columns, RUN)[0])[0]


def grouped_seconds(shape: GroupedShape) -> float:
    rows, columns, depth, groups = shape
    product, *_ = linear(
        "product", rows * groups, depth, columns, RUN, engine=Engine.GROUPED, weights=groups
    )
    return TRUE.seconds_of(product)[0]


def attention_of(heads: int) -> Operation:
    run = replace(RUN, tensor_parallel=MODEL.num_attention_heads // heads)
    return next(o for o in part_of("*", MODEL, run).operations if o.is_attention)


def attention_seconds(shape: AttentionShape) -> tuple[float, float]:
    samples, sequence, heads, groups, width = shape
    assert (samples, sequence, groups, width) == (1, RUN.sequence, heads, 128)
    forward, backward, _ = TRUE.seconds_of(attention_of(heads))
    return forward, backward


def collective_seconds(group: Group, ranks: int) -> dict[float, float]:
    """Return the seconds of one collective on the emulated machine, by its size in bytes."""
    factor = EMULATED.of_gather if group is Group.TENSOR else EMULATED.of_exchange
    return {
        float(size): factor(size)
        * SHEET.seconds_to_exchange(Exchange(group, ranks, 1, Passes(size, 0.0)))[0]
        for size in GATHERED
    }


def factors(model: Model = MODEL) -> MachineFactors:
    run = RUN_OF_EXPERTS if model.num_experts else RUN
    exchanged = collective_seconds(Group.EXPERT, 8) if model.num_experts else {}
    return MachineFactors(
        GPU,
        VERSIONS,
        "bf16",
        timed_products(model, run, SHEET, product_seconds),
        timed_collectives(Group.TENSOR, 2, 1, SHEET, collective_seconds(Group.TENSOR, 2)),
        timed_grouped(model, run, SHEET, grouped_seconds),
        *timed_attention(model, run, SHEET, attention_seconds),
        timed_collectives(Group.EXPERT, run.expert_parallel, 1, SHEET, exchanged),
    )


def costs_of(tensor_parallel: int, stages: int, rates: Rates) -> Costs:
    execution = replace(RUN, tensor_parallel=tensor_parallel)
    layers = [len(MODEL.layers) // stages] * stages
    return estimate(MODEL, stages_of(MODEL, layers), execution, rates)


def profiled(
    folder: Path,
    measured: MachineFactors | None,
    model: Model = MODEL,
    run: Execution = RUN,
) -> Path:
    """Write the costs that a training with four pipeline ranks measures on the emulated machine,
    and return the file."""
    stages = stages_of(model, [4] * 4)
    costs = estimate(model, stages, run, TRUE)
    basis = Basis(model, stages, run, replace(SHEET, factors=measured))
    path = folder / "costs.json"
    machine = Machine(links={}, ranks_of_node=8, reserved=None)
    save_costs(costs, path, as_data(layer_costs(costs, basis, is_divided=False), machine))
    return path


def rates_in(path: Path) -> Rates:
    read = load_measured(path, "h100")
    assert read is not None
    return read.rates


def test_the_factors_of_an_emulated_machine_come_back(tmp_path: Path) -> None:
    read = rates_in(profiled(tmp_path, factors())).factors
    assert read == factors()
    assert len(read.products) > 20 and len(read.gathers) == 5
    assert len(read.attention) == len(read.attention_backward) == 4
    for heads in (32, 4):
        flops, moved = attention_of(heads).flops.forward, attention_of(heads).moved.forward
        true = EMULATED.of_attention(flops, moved)
        assert read.of_attention(flops, moved) == pytest.approx(true)
    assert true == (1.5, 1.9), "of 4 heads"
    for shape in [(4096, 6144, 4096), (4096, 512, 4096), (4096, 4096, 1792)]:
        assert read.of_product(shape) == pytest.approx(EMULATED.of_product(shape))
    assert [read.of_gather(size) for size in (2**20, 2**19, 2**24)] == pytest.approx([6, 6, 1.3])
    assert read.of_gather(2**23) == pytest.approx((6 + 1.3) / 2), "between 4 and 16 MiB"
    assert (read.of_gather(1), read.of_gather(2**40)) == pytest.approx((6, 1.3))


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 8), (4, 4), (8, 4)])
def test_other_sizes_cost_what_they_do_on_the_emulated_machine(
    ranks: int, stages: int, tmp_path: Path
) -> None:
    """With measured factors of the machine, the estimate for other sizes differs from that
    machine's time by at most 1 %. With measured costs by layer type only, a layer at TP 8 is scaled
    as at TP 2, and the estimate is wrong by more than 10 %."""
    told = costs_of(ranks, stages, rates_in(profiled(tmp_path, factors())))
    true = costs_of(ranks, stages, TRUE)
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        assert told.seconds[kind] == pytest.approx(true.seconds[kind], rel=0.01)
    if ranks == 8:
        by_layers = costs_of(ranks, stages, rates_in(profiled(tmp_path, None)))
        error = by_layers.seconds[Kind.FORWARD][0] / true.seconds[Kind.FORWARD][0] - 1
        assert abs(error) > 0.1


@pytest.mark.parametrize("ranks", [4, 8, 16])
def test_experts_on_more_or_fewer_ranks_cost_what_they_do_there(ranks: int, tmp_path: Path) -> None:
    """With measured factors of the machine, the estimate is right for other numbers of
    expert-parallel ranks. The factors were measured with 8 such ranks; with 4, an expert has half
    as many rows."""
    measured = factors(EXPERTS)
    assert len(measured.grouped) > 10 and len(measured.exchanges) == 5
    path = profiled(tmp_path, measured, EXPERTS, RUN_OF_EXPERTS)
    read = rates_in(path)
    assert read.factors == measured
    stages = stages_of(EXPERTS, [16])
    run = replace(RUN, expert_parallel=ranks)
    told, true = (estimate(EXPERTS, stages, run, rates).seconds for rates in (read, TRUE))
    for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        assert told[kind] == pytest.approx(true[kind], rel=0.01)
    if ranks == 4:
        alone = rates_in(profiled(tmp_path, None, EXPERTS, RUN_OF_EXPERTS))
        by_layers = estimate(EXPERTS, stages, run, alone).seconds
        kind = Kind.FORWARD
        assert by_layers[kind] != pytest.approx(true[kind], rel=0.05)


def test_exchanges_take_the_factor_of_their_length() -> None:
    """An exchange of tokens between experts' ranks takes the factor measured for its size. The
    factor does not apply to exchanges by a library that sends each token once to each rank."""
    rates = replace(SHEET, factors=factors(EXPERTS))
    for size, factor in ((2**19, 5), (2**24, 1.4)):
        there_and_back = Exchange(Group.EXPERT, 8, 1, Passes(2 * size, 2 * size))
        estimated = SHEET.seconds_to_exchange(there_and_back)
        found = rates.seconds_to_exchange(there_and_back)
        assert found == pytest.approx([factor * seconds for seconds in estimated])
        once = replace(there_and_back, choices=4)
        assert rates.seconds_to_exchange(once) == SHEET.seconds_to_exchange(once)


SIZES = ((1, 8), (2, 4), (4, 2), (8, 1))


def step(sizes: tuple[int, int], rates: Rates) -> float:
    """Return the seconds of a step of 16 microbatches under 1F1B on 8 GPUs, with ``sizes`` of
    tensor- and pipeline-parallel ranks."""
    ranks, stages = sizes
    costs = costs_of(ranks, stages, rates)
    program = build_program(choose("1f1b"), Problem(line(stages), 16, costs))
    return simulate(program, costs).makespan


def test_the_best_sizes_are_those_of_the_emulated_machine(tmp_path: Path) -> None:
    def best(rates: Rates) -> list[tuple[int, int]]:
        return sorted(SIZES, key=lambda sizes: step(sizes, rates))

    assert best(rates_in(profiled(tmp_path, factors()))) == best(TRUE)
    assert best(SHEET)[0] != best(TRUE)[0], "the emulated machine tells nothing new"


# ---- the file of measured factors


def test_a_file_of_another_gpu_is_refused_by_its_name(tmp_path: Path) -> None:
    path = profiled(tmp_path, factors())
    assert load_measured(path) is not None, "no GPU is named"
    assert load_measured(path, GPU) is not None
    with pytest.raises(ValueError, match=f"was measured on {GPU}, and the GPU .* is a100"):
        load_measured(path, "a100")
    words = "plan pp=2,m=4,layers=16,hidden=64,heads=4,sequence=64,vocabulary=256"
    result = CliRunner().invoke(app, [*words.split(), "--gpu", "a100", "--costs", str(path)])
    assert result.exit_code == 2
    assert "measured on NVIDIA H100 80GB HBM3" in " ".join(result.output.split())


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = profiled(tmp_path, factors())
    data = json.loads(path.read_text())
    data["machine"]["version"] = 1
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"machine .*measured factors is 1, and only 2 is known"):
        load_measured(path)


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    path = profiled(tmp_path, factors())
    machine = json.loads(path.read_text())["machine"]
    assert (machine["gpu"], tuple(machine["versions"])) == (GPU, VERSIONS)
    read = load_measured(path)
    assert read is not None
    remarks = " ".join(read.remarks(MODEL))
    assert f"a machine with {GPU} (torch 2.11.0, CUDA 13.0, NCCL 2.29.2)" in remarks
    assert "for 5 gathers of tensor-parallel ranks" in remarks
    assert "1.30 for 4 attentions" in remarks
    assert "No factor was measured for experts' products, exchanges of expert-parallel" in remarks
    assert load_costs(path, line(4)).seconds[Kind.FORWARD], "figures per stage are read as ever"


def test_without_tensor_parallel_ranks_no_gather_is_scaled() -> None:
    alone = replace(factors(), gathers=())
    assert alone.of_gather(2**20) == 1.0
    assert "measured for experts' products, gathers of tensor-parallel ranks, " in alone.remark()


@pytest.mark.parametrize("name", ["attention", "gathers"])
def test_rows_of_another_length_are_refused(name: str, tmp_path: Path) -> None:
    path = profiled(tmp_path, factors())
    data = json.loads(path.read_text())
    data["machine"][name] = data["machine"]["products"]
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"of {name} has \d+ values, not \d+"):
        load_measured(path)
