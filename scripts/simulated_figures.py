"""Tables and sentences of README.md and docs/ whose numbers are simulated.

    python -m scripts.simulated_figures [--quick] [PAGE ...]

A typed number becomes wrong with the next change of a schedule, unnoticed. Tables stand between
marks and are written whole; in sentences only the numbers are written. A test compares all of them
with the pages. --quick omits what searches, which takes minutes.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes, peaks
from megatron_ext.compile.program.noise import spread
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose, entries
from megatron_ext.cost_model.estimate import estimate
from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.cost_model.model import Model, stages_of
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.observe.noise_text import parse_noise
from megatron_ext.planner.candidate import VocabMethod
from megatron_ext.planner.fitting import consider
from megatron_ext.planner.training import Training
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import P2P, Offload, Problem, Recompute, ScheduleOptions
from megatron_ext.schedule.slices import Lengths, Slices
from megatron_ext.search.bounds import lower_bound
from scripts.benchmarks import shared_prompts, unequal, uneven
from scripts.benchmarks.shared_prompts import MODEL as LLAMA_3_70B
from scripts.evaluation.measured import read_measured
from scripts.evaluation.stage_times import read_stages
from scripts.readme_table import vocabulary_steps
from scripts.simulated_steps import PLAIN, USUAL_COSTS, simulated_step
from scripts.tables import table, with_part

ROOT = Path(__file__).parents[1]
_PAIRED = ScheduleOptions(pairs=True)


@dataclass(frozen=True)
class SimulatedTable:
    """A table of a page, between marks.

    Attributes:
        page: path of the page below the repository's root.
        name: the table's name in its marks.
        text: makes the table.
        is_slow: whether that runs a search.
    """

    page: str
    name: str
    text: Callable[[], str]
    is_slow: bool = False

    def written_into(self, page: str) -> str:
        """Return the text of ``page`` with the table computed anew."""
        return with_part(page, self.name, self.text())


@dataclass(frozen=True)
class SimulatedSentence:
    """A sentence of a page with simulated numbers.

    Attributes:
        page: path of the page below the repository's root.
        name: what the sentence is about.
        words: the sentence, with ``{}`` in place of each number.
        figures: computes the numbers, in their order.
        is_slow: whether that runs a search.
    """

    page: str
    name: str
    words: str
    figures: Callable[[], Sequence[str]]
    is_slow: bool = False

    def written_into(self, page: str) -> str:
        """Return the text of ``page`` with the sentence's numbers computed anew.

        Raises:
            ValueError: the page does not have the sentence, or has it several times.
        """
        words = (map(re.escape, text.split(" ")) for text in self.words.split("{}"))
        pattern = r"([\d.]*\d)".join(map(r"\s+".join, words))
        found = list(re.finditer(pattern, page))
        if len(found) != 1:
            raise ValueError(
                f"{self.page} must have the sentence {self.words!r} once, and has it {len(found)} "
                "times"
            )
        figures = self.figures()
        for number in range(len(figures), 0, -1):
            start, end = found[0].span(number)
            page = page[:start] + figures[number - 1] + page[end:]
        return page


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _half_memory() -> str:
    rows = []
    for ranks, microbatches in ((8, 32), (4, 16), (2, 8)):
        stock = simulated_step("1f1b", USUAL_COSTS, ranks, microbatches)
        ours = simulated_step("v-auto", USUAL_COSTS, ranks, microbatches, limit="0.5x")
        cells = (f"{one.makespan:.4g} at {one.peak:g}" for one in (stock, ours))
        rows.append((ranks, microbatches, *cells, _percent(ours.makespan / stock.makespan - 1)))
    return table(("p", "m", "1F1B", "`v-auto` within half of its memory", "longer by"), rows)


def _pairs() -> str:
    def row(spec: str, name: str, *, by_stock: bool) -> tuple[str, ...]:
        alone, paired = (
            simulated_step(
                spec, "f=10,i=12,w=8,comm=0.2,overlap_saving=5", 8, 32, options, by_stock=by_stock
            )
            for options in (PLAIN, _PAIRED)
        )
        cells = (f"{one.makespan:.7g} at {one.peak:g}" for one in (alone, paired))
        return name, *cells, f"{paired.pairs} of {8 * 32 * paired.vpp}"

    def rows() -> Iterator[tuple[str, ...]]:
        for chunks in ("", ":vpp=4"):
            spec = f"interleaved{chunks}"
            yield row(spec, f"`{spec}`, as Megatron runs it", by_stock=True)
            yield row(spec, f"`{spec}`, under our runtime", by_stock=False)
            yield row(f"interleaved-zb{chunks}", f"`interleaved-zb{chunks}`", by_stock=False)
        for spec in ("zb-v", "dualpipe-v"):
            yield row(spec, f"`{spec}`", by_stock=False)

    return table(("schedule", "alone", "in pairs", "forward passes in pairs"), rows())


def _slices() -> str:
    numbers = (1, 2, 4, 8)

    def cell(spec: str, number: int) -> str:
        options = ScheduleOptions(slices=Slices(number, Lengths.EVEN))
        made = simulated_step(spec, "f=1,i=1,w=1", 8, 32, options, by_stock=False)
        return f"{made.makespan:g} at {made.peak:g}"

    rows = (
        (f"`{spec}`", *(cell(spec, number) for number in numbers))
        for spec in ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
    )
    return table(("schedule", *(f"k = {number}" for number in numbers)), rows)


def _published_bubbles() -> str:
    """Return the bubbles of the span with the pass times that the zero-bubble paper measured."""
    rows = []
    for name, ranks, microbatches, costs in (
        ("1.5B", 8, 24, "f=18.522,i=18.086,w=9.337,comm=0.601"),
        ("28.3B", 32, 96, "f=10.419,i=10.207,w=7.715,comm=0.408"),
    ):
        steps = (
            simulated_step(spec, costs, ranks, microbatches, by_stock=False)
            for spec in ("1f1b", "zb-h1")
        )
        bubbles = (f"{one.bubble_share_span:.4f}".removeprefix("0") for one in steps)
        rows.append((name, ranks, microbatches, *bubbles))
    return table(("model", "p", "m", "1F1B", "ZB-H1"), rows)


def _shared_prompts() -> str:
    headings = ("tokens of a prompt", "of an answer", "packs of sequences", "with prompts once")
    rows = (cells for cells, _, _ in shared_prompts.rows())
    return table((*headings, "a step is so many times as fast"), rows)


def _sliced_offload() -> str:
    """Return the table on slices with offload.

    A microbatch has 64 bytes on each stage, of which W needs 32, and 8 bytes of keys and values.
    """
    offloads = (Offload.NONE, Offload.HALF, Offload.FULL)

    def cell(spec: str, slices: Slices, offload: Offload) -> str:
        resolved = choose(spec)
        placement = resolved.place(4)
        stages = placement.stages
        costs = parse_costs("f=10,i=12,w=8,comm=0.5,attention=0.3,d2h=6", placement)
        costs = costs.with_passes(
            held_bytes={Held.ACTIVATION: (64.0,) * stages, Held.WEIGHT_INPUTS: (32.0,) * stages}
        ).with_slices(keys_values=(8.0,) * stages)
        options = ScheduleOptions(slices=slices, activation_offload=offload)
        made = build_program(resolved, Problem(placement, 8, costs, options=options))
        most = max(peaks(made.schedule, in_bytes(costs))) / (64 * placement.chunks)
        return f"{simulate(made, costs).makespan:.4g} at {most:.2f}"

    rows = (
        (f"`{spec}`, {name}", *(cell(spec, slices, offload) for offload in offloads))
        for spec in ("gis", "zb-v")
        for name, slices in (
            ("uncut", Slices(1, Lengths.EVEN)),
            ("four slices", Slices(4, Lengths.BALANCED)),
        )
    )
    return table(("schedule", "no offload", "`half`", "`full`"), rows)


def _overlapping(spec: str, ranks: int, microbatches: int) -> tuple[float, float]:
    """Return the seconds of a step of ``spec`` that overlaps no other step, and of a step that
    overlaps the steps before and after it."""
    alone, with_it = (
        simulated_step(spec, USUAL_COSTS, ranks, microbatches, options).step
        for options in (PLAIN, ScheduleOptions(steps_overlap=True))
    )
    return alone, with_it


def _post_validation() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for spec in ("zb-h2", "zb-2p", "zb-auto", "zb-v", "interleaved-zb"):
            alone, with_it = _overlapping(spec, 8, 32)
            less = _percent(1 - with_it / alone, 1)
            yield f"`{spec}`", f"{alone:.0f}", f"{with_it:.0f}", f"{less} less"

    return table(
        ("schedule", "a step without it", "with it", "compared with the same schedule"), rows()
    )


def _recompute() -> str:
    limits, fitting = ("2", "3", "4", "5", "6"), ScheduleOptions(recompute=Recompute(fit=True))

    def steps(spec: str, options: ScheduleOptions) -> list[tuple[float, float]]:
        made = [
            simulated_step(spec, USUAL_COSTS, 8, 32, options, limit, by_stock=False)
            for limit in limits
        ]
        return [(one.makespan, one.recomputed) for one in made]

    plain, searched = steps("v-auto", PLAIN), steps("v-auto", fitting)
    rows = [
        ("v-auto without recompute", *(f"{makespan:.4g}" for makespan, _ in plain)),
        ("v-auto with `fit`", *(f"{makespan:.4g}" for makespan, _ in searched)),
        ("share that it recomputes", *(_percent(share) for _, share in searched)),
    ]
    for spec, name in (("zb-v", "zb-v"), ("1f1b", "1F1B")):
        rows.append((f"{name} with `fit`", *(f"{one[0]:.4g}" for one in steps(spec, fitting))))
    return table(("limit", *limits), rows)


def _noise() -> str:
    noises = ("0.1", "0.2", "0,ranks=0.05")

    def row(spec: str, name: str, limit: str = "") -> tuple[str, ...]:
        resolved = choose(spec)
        placement = resolved.place(8)
        costs = parse_costs(USUAL_COSTS, placement)
        given = parse_limit(limit, 8, 32) if limit else None
        program = build_program(resolved, Problem(placement, 32, costs, given))
        without = simulate(program, costs).makespan
        spreads = (spread(program, parse_noise(noise)).makespan for noise in noises)
        cells = (f"{one.median / without - 1:.1%}, {one.p90 / without - 1:.1%}" for one in spreads)
        return name, f"{without:.4g}", *cells

    rows = (
        row("1f1b", "1f1b, under our executor"),
        *(row(spec, spec) for spec in ("zb-h1", "interleaved-zb", "zb-v")),
        row("v-auto", "v-auto, limit 5", "5"),
    )
    return table(("", "without", *noises), rows)


def _vocabulary() -> str:
    training = Training(
        8, 32, partial(parse_costs, f"{USUAL_COSTS},output_layer=20/24/16"), layers=31
    )

    def cell(spec: str, method: VocabMethod) -> str:
        variant = training.variant(spec, method)
        assert variant is not None
        try:
            variant.check_launch()
        except ValueError:
            return "-"
        return f"{consider(variant, method).step:.5g}"

    rows = (
        (f"`{spec}`", *(cell(spec, method) for method in VocabMethod))
        for spec in ("1f1b", "interleaved", "zb-h1", "zb-v", "v-half")
    )
    names = ("head on its stage", "Megatron's redistribution, 31 layers", "variant 1", "variant 2")
    return table(("schedule", *names), rows)


def _towers() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for trained in uneven.TOWERS:
            for spec in ("1f1b", uneven.LINE, uneven.V):
                made = uneven.with_tower(trained, spec)
                name = trained if spec == "1f1b" else ""
                yield name, spec, f"{made.even:.3f}", f"{made.laid_out:.3f}"

    return table(("tower", "schedule", "even layers", "laid out"), rows())


def _slow_ranks() -> str:
    def rows() -> Iterator[tuple[object, ...]]:
        for rank in (0, 4, 7):
            made = [uneven.with_slow_rank(rank, spec) for spec in (uneven.LINE, uneven.V)]
            cells = ((f"{one.even:.3f}", f"{one.laid_out:.3f}") for one in made)
            yield rank, *(cell for both in cells for cell in both)

    headings = (
        f"{spec}, {how}" for spec in (uneven.LINE, uneven.V) for how in ("even layers", "laid out")
    )
    return table(("slow rank", *headings), rows())


def _slow_link() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for spec in ("zb-auto", uneven.V):
            fixed, found = uneven.with_slow_link(6, 10.0, spec)
            yield spec, f"{fixed:.2f}", f"{found:.2f}"

    return table(("schedule", "order made for equal links", "order made for this link"), rows())


def _unequal() -> str:
    all_three = ("1f1b", "zb-h1", "v-auto")
    loads = (
        ("full packs of 128k tokens", "long-128k", all_three, False),
        ("experts over the replicas", unequal.TIED, ("v-auto",), True),
        ("packs up to 8k, not filled", "sft-packs", all_three, False),
        ("single conversations", "sft-single", ("zb-h1",), False),
        ("full packs of 8k tokens", "full-8k", ("zb-h1",), False),
    )

    def text(ratio: float) -> str:
        return f"{ratio:.3f}".removeprefix("0")

    def cell(made: unequal.Gain) -> str:
        figures = f"{text(made.ordered)}/{text(made.dealt)}"
        if made.profile is None:
            return figures
        return f"{figures}=" if made.best == made.dealt else f"{figures}/{text(made.profile)}"

    def rows() -> Iterator[tuple[str, ...]]:
        for name, load, specs, tied in loads:
            for spec in specs:
                made = (unequal.gain(spec, p, m, load, tied=tied) for p, m in unequal.SIZES)
                yield name if spec == specs[0] else "", spec, *map(cell, made)

    return table(("load", "schedule", *(f"p={p}, m={m}" for p, m in unequal.SIZES)), rows())


TABLES = (
    SimulatedTable("docs/activations.md", "recompute", _recompute, is_slow=True),
    SimulatedTable("docs/choosing-a-schedule.md", "noise", _noise, is_slow=True),
    SimulatedTable("docs/measurements.md", "half the memory", _half_memory, is_slow=True),
    SimulatedTable("docs/measurements.md", "published bubbles", _published_bubbles),
    SimulatedTable("docs/pairs.md", "pairs", _pairs),
    SimulatedTable("docs/post-validation.md", "steps", _post_validation),
    SimulatedTable("docs/shared-prompts.md", "gains", _shared_prompts),
    SimulatedTable("docs/slices.md", "slices", _slices),
    SimulatedTable("docs/slices.md", "offload", _sliced_offload),
    SimulatedTable("docs/unequal-microbatches.md", "gains", _unequal, is_slow=True),
    SimulatedTable("docs/uneven-stages.md", "towers", _towers, is_slow=True),
    SimulatedTable("docs/uneven-stages.md", "slow ranks", _slow_ranks, is_slow=True),
    SimulatedTable("docs/uneven-stages.md", "slow link", _slow_link, is_slow=True),
    SimulatedTable("docs/vocabulary-parallelism.md", "vocabulary", _vocabulary),
)


def _bubbles() -> Sequence[str]:
    before, after = (
        simulated_step(spec, USUAL_COSTS, 4, 8, by_stock=False) for spec in ("1f1b", "zb-h1")
    )
    assert before.peak == after.peak, "README.md says that the peaks are the same"
    return [f"{100 * one.bubble_share_makespan:.0f}" for one in (before, after)]


def _full_recompute() -> Sequence[str]:
    repeated = "f=10,i=22,w=8,comm=1"  # the costs of I contain a second F, the recompute
    steps = (simulated_step(spec, repeated, 8, 32, by_stock=False) for spec in ("zb-v", "1f1b"))
    return [f"{one.makespan:.4g}" for one in steps]


def _copies_over_passes() -> Sequence[str]:
    """Return seconds of copies to the host and back over seconds of F and I, for Llama 3 70B on
    H100s.

    The first ratio is with all activations, the second with recompute of ``layernorm`` and ``mlp``.
    """
    described = parse_model(LLAMA_3_70B.format(4096))
    model, execution = described.model, described.execution(8)
    stages = stages_of(model, model.evenly(8))
    figures = []
    for modules in ((), ("layernorm", "mlp")):
        executed = replace(execution, recompute_modules=frozenset(modules))
        costs = estimate(model, stages, executed, GPUS["h100"].rates())
        assert costs.host is not None
        stage = 3  # a stage without the embedding and the output layer
        passes = sum(costs.seconds[kind][stage] for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT))
        copies = costs.host.to_host[stage] + costs.host.from_host[stage]
        figures.append(f"{copies / passes:.2g}")
    return figures


# K-EXAONE-236B-A23B, as its config.json has it, with full attention in all layers.
_EXAONE_236B = Model(
    layers=("*-", *["*E"] * 47),
    hidden_size=6144,
    num_attention_heads=64,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=18432,
    vocabulary=153600,
    gated_linear_unit=True,
    untie_embeddings_and_output_weights=True,
    qk_layernorm=True,
    normalization="RMSNorm",
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
)


def _sliced(number: int) -> ScheduleOptions:
    return ScheduleOptions(slices=Slices(number, Lengths.BALANCED))


def _weights_of_a_slice() -> Sequence[str]:
    """Return the milliseconds of W of a layer with experts, for many tokens and for few."""
    stages = stages_of(_EXAONE_236B, _EXAONE_236B.evenly(48))
    figures = []
    for tokens in (2048, 256):
        execution = Execution(tokens, tensor_parallel=4, expert_parallel=8)
        costs = estimate(_EXAONE_236B, stages, execution, GPUS["h100"].rates())
        figures.append(f"{1e3 * costs.seconds[Kind.BACKWARD_WEIGHT][20]:.1f}")
    return figures


def _two_slices() -> Sequence[str]:
    """Return how many times as fast two slices make a step of 1F1B, for two models."""
    dense = parse_model(LLAMA_3_70B.format(4096))
    executed = Execution(2048, tensor_parallel=4, expert_parallel=8)
    figures = []
    for model, execution, ranks, microbatches in (
        (dense.model, dense.execution(8), 4, 8),
        (_EXAONE_236B, executed, 8, 16),
    ):
        resolved, stages = choose("1f1b"), stages_of(model, model.evenly(ranks))
        placement = resolved.place(ranks)
        steps = []
        for number in (1, 2):
            costs = estimate(model, stages, execution, GPUS["h100"].rates(), slices=number)
            cut = PLAIN if number == 1 else _sliced(number)
            problem = Problem(placement, microbatches, costs, options=cut)
            steps.append(simulate(build_program(resolved, problem), costs).makespan)
        figures.append(f"{steps[0] / steps[1]:.2f}")
    return figures


def _joined_weights() -> Sequence[str]:
    options = (
        ScheduleOptions(slices=Slices(2, Lengths.EVEN, joined_weights=joined))
        for joined in (True, False)
    )
    steps = (simulated_step("zb-v", "f=10,i=10,w=10,fixed_w=3", 4, 4, one) for one in options)
    return [f"{one.makespan:g}" for one in steps]


def _half_the_ranks() -> Sequence[str]:
    steps = (
        simulated_step("zb-v", f"f={each},i={each},w={each}", ranks, microbatches)
        for ranks, microbatches, each in ((4, 8, 2), (8, 16, 1))
    )
    return [f"{one.makespan:g}" for one in steps]


def _batched() -> Sequence[str]:
    """Return makespans with one communicator and with one for each channel, for two costs of a
    message."""
    return [
        f"{simulated_step('interleaved-zb', costs, 8, 32, ScheduleOptions(p2p=p2p)).makespan:.0f}"
        for costs in (USUAL_COSTS, "f=10,i=12,w=8,comm=3")
        for p2p in (P2P.BATCHED, P2P.ASYNC)
    ]


def _share_of_passes() -> Sequence[str]:
    made = simulated_step("interleaved:vpp=5", "f=10,i=12,w=8,comm=0.1", 4, 128)
    return [f"{100 * (1 - made.bubble_share_makespan):.0f}"]


def _long_input_gradient() -> Sequence[str]:
    costs = "f=10,i=20,w=6,comm=1"
    specs = ("v-half", "v-min", "1f1b", "v-auto", "gis")
    return [f"{simulated_step(spec, costs, 8, 32).makespan:.0f}" for spec in specs]


def _published() -> Sequence[str]:
    return [str(len(list(read()))) for read in (read_measured, read_stages)]


def _above_the_bound() -> Sequence[str]:
    """Return the per cent by which v-auto's makespan is above the bound of a V, by memory limit and
    number of ranks."""
    resolved, figures = choose("v-auto"), []
    for share in (1.0, 0.75, 0.5):
        for ranks in (8, 16):
            limit, placement = f"{share * ranks:g}", resolved.place(ranks)
            made = simulated_step("v-auto", USUAL_COSTS, ranks, 4 * ranks, limit=limit)
            costs = parse_costs(USUAL_COSTS, placement)
            given = parse_limit(limit, ranks, 4 * ranks)
            problem = Problem(placement, 4 * ranks, costs, given)
            gap = made.makespan / lower_bound(problem, splits_backward=True) - 1
            figures.append(f"{100 * gap:.1f}")
    return figures


def _two_steps() -> Sequence[str]:
    return [f"{seconds:.0f}" for seconds in _overlapping("zb-2p", 4, 8)]


def _by_stock() -> Sequence[str]:
    steps = (simulated_step(spec, USUAL_COSTS, 8, 32) for spec in ("1f1b", "interleaved"))
    return [f"{one.makespan:.0f}" for one in steps]


def _lengths() -> Sequence[str]:
    options = (
        ScheduleOptions(slices=Slices(4, lengths)) for lengths in (Lengths.EVEN, Lengths.BALANCED)
    )
    steps = (
        simulated_step("1f1b", "f=1,i=1,w=1,attention=0.3", 8, 32, one, by_stock=False)
        for one in options
    )
    return [f"{one.makespan:.5g}" for one in steps]


def _in_slices() -> Sequence[str]:
    costs = f"{USUAL_COSTS},attention=0.3,latency=0.02"
    cut = _sliced(4)
    figures = []
    for spec in ("1f1b", "zb-h1", "zb-v"):
        sliced = simulated_step(spec, costs, 8, 8, cut, by_stock=False)
        uncut = simulated_step(spec, costs, 8, 8)
        figures += [f"{sliced.makespan:.0f}", f"{uncut.makespan:.0f}"]
    return [*figures, f"{sliced.peak:.2g}", f"{uncut.peak:g}"]


def _ordered_and_dealt() -> Sequence[str]:
    steps = (unequal.over_another(spec, "1f1b", 8, 16, "long-128k") for spec in ("1f1b", "zb-h1"))
    return [f"{dealt:.2f}".removeprefix("0") for _, dealt in steps]


def _vocabulary_laid_out() -> Sequence[str]:
    stock, ours = vocabulary_steps()
    return [f"{stock.seconds:.4g}", f"{stock.seconds / ours.makespan:.2f}"]


# Rows of the README's opening table, without their last two cells (makespan and peak), which are
# computed.
_OPENING_ROW = re.compile(r"^(\| \[`(.+?)`\].*)\| [\d.]+ \| [\d.]+ \|$", re.MULTILINE)


def _opening_row(spec: str) -> Sequence[str]:
    made = simulated_step(spec, USUAL_COSTS, 8, 32, by_stock=False)
    return [f"{made.makespan:g}", f"{made.peak:g}"]


def _opening_table() -> Iterator[SimulatedSentence]:
    page = "docs/schedules.md"
    for row, spec in _OPENING_ROW.findall((ROOT / page).read_text()):
        is_slow = entries()[spec].traits.searches
        words, figures = f"{row}| {{}} | {{}} |", partial(_opening_row, spec)
        yield SimulatedSentence(page, spec, words, figures, is_slow)


SENTENCES = (
    SimulatedSentence(
        "README.md",
        "bubbles",
        "at the same peak memory the bubble falls from {} % to {} % of a step",
        _bubbles,
    ),
    SimulatedSentence(
        "docs/activations.md",
        "full recompute",
        "Megatron's full recompute takes {} under zb-v and {} under 1F1B",
        _full_recompute,
    ),
    SimulatedSentence(
        "docs/activations.md",
        "copies over passes",
        "TP 8 and 4096 tokens on H100s k is estimated as {}, and as {} with these modules",
        _copies_over_passes,
    ),
    SimulatedSentence(
        "docs/architecture.md",
        "one communicator",
        "`interleaved-zb` takes {} instead of {} if a message costs 1, and {} instead of {} if it "
        "costs 3",
        _batched,
    ),
    SimulatedSentence(
        "docs/choosing-a-schedule.md",
        "share of passes",
        "under Megatron its passes take {} % of a step",
        _share_of_passes,
    ),
    SimulatedSentence(
        "docs/choosing-a-schedule.md",
        "long input gradient",
        "take longer than Megatron's 1F1B ({} and {} against {}), v-auto and gis less ({} and {} "
        "in the same memory)",
        _long_input_gradient,
        is_slow=True,
    ),
    SimulatedSentence(
        "docs/estimated-costs.md",
        "published",
        "predicts {} published steps and {} published stages",
        _published,
    ),
    SimulatedSentence(
        "docs/measurements.md",
        "bound",
        "a bound below which no V of the same memory is: {} % at p = 8 and {} % at p = 16 in "
        "1F1B's memory, {} and {} % in three quarters of it, and {} and {} % in half of it",
        _above_the_bound,
        is_slow=True,
    ),
    SimulatedSentence(
        "docs/post-validation.md",
        "two steps",
        "a step every {} without it, every {} with it",
        _two_steps,
    ),
    SimulatedSentence(
        "docs/schedules.md",
        "as Megatron runs them",
        "`1f1b` takes {} and `interleaved` {}.",
        _by_stock,
    ),
    SimulatedSentence(
        "docs/schedules.md",
        "half the ranks",
        "zb-v: {} instead of {} with p = 8",
        _half_the_ranks,
    ),
    SimulatedSentence(
        "docs/slices.md",
        "weights of a slice",
        "is estimated at {} ms for 2,048 tokens, and at {} ms for 256.",
        _weights_of_a_slice,
    ),
    SimulatedSentence(
        "docs/slices.md",
        "two slices",
        "make a step of a dense 70B {} times as fast (TP 8, p = 4, m = 8), and two of 1,024 one of "
        "K-EXAONE-236B {} times",
        _two_slices,
    ),
    SimulatedSentence(
        "docs/slices.md", "joined weights", "`zb-v` takes {} in place of {}.", _joined_weights
    ),
    SimulatedSentence(
        "docs/slices.md",
        "lengths",
        "`1f1b` above takes {} with four even slices and {} with `balanced` ones",
        _lengths,
    ),
    SimulatedSentence(
        "docs/slices.md",
        "in slices",
        "`1f1b` {} ({} without slices, as Megatron runs it), `zb-h1` {} ({}) and `zb-v` {} ({}), "
        "which holds {} microbatches instead of {}.",
        _in_slices,
    ),
    SimulatedSentence(
        "docs/unequal-microbatches.md",
        "ordered and dealt",
        "ordered and dealt 1F1B takes {} of a step and ordered and dealt zb-h1 {}",
        _ordered_and_dealt,
        is_slow=True,
    ),
    SimulatedSentence(
        "docs/vocabulary-parallelism.md",
        "laid out",
        "`plan` finds {} for Megatron's schedules (`1f1b`) as Megatron runs them, {} times",
        _vocabulary_laid_out,
        is_slow=True,
    ),
)
FIGURES: tuple[SimulatedTable | SimulatedSentence, ...] = (
    *TABLES,
    *SENTENCES,
    *_opening_table(),
)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "pages", nargs="*", metavar="PAGE", help="pages such as docs/pairs.md; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="omit figures that need a search")
    given = parser.parse_args(words)
    for one in FIGURES:
        if (given.pages and one.page not in given.pages) or (given.quick and one.is_slow):
            continue
        page = ROOT / one.page
        page.write_text(one.written_into(page.read_text()))
        print(f"{one.page}: {one.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
