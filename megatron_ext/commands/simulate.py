"""``megatron-ext simulate``: predicted time and memory of a schedule.

Options describe a problem, `compile.build` makes and proves its program, and the rest of this file
says in words what the simulator finds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_ext.base.progress import task
from megatron_ext.base.words import counted
from megatron_ext.commands.options import (
    UNIT,
    CostsText,
    HtmlPage,
    Json,
    Limit,
    Microbatches,
    Ranks,
    SpecArgument,
    Speeds,
)
from megatron_ext.commands.output import fail, print_table
from megatron_ext.commands.progress_line import showing_progress
from megatron_ext.commands.schedule_options import config_and_options, option, with_schedule_options
from megatron_ext.commands.simulation_files import SimulationFiles
from megatron_ext.compile.auto_spec import auto_searches
from megatron_ext.compile.build import prove_built
from megatron_ext.compile.feature_settings import setting_of
from megatron_ext.compile.overlap import what_overlapping_gains
from megatron_ext.compile.program.graph import Device
from megatron_ext.compile.program.noise import Spread, spread
from megatron_ext.compile.program.simulate import simulate as simulate_program
from megatron_ext.compile.program.unequal import UnequalMicrobatches, profile_of
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec, choose
from megatron_ext.compile.report import ScheduleReport, report
from megatron_ext.config import OVERLAP
from megatron_ext.observe.noise_text import parse_noise, rows_of_spread
from megatron_ext.planner.candidate import Variant
from megatron_ext.planner.shortest_search import AS_1F1B, take
from megatron_ext.planner.stock import run_by_stock
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.microbatch_costs import MicrobatchLoads, parse_microbatch_costs
from megatron_ext.schedule.problem import Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.rank_speeds import at_speeds
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR
from megatron_ext.search.certify import Certificate
from megatron_ext.search.certify import certify as certify_program
from megatron_ext.search.for_places import at_places_of, judged_for_places

LONGEST = 86400.0  # largest time limit that may be requested, in seconds: a day
MOST_RANKS = 16  # largest number of ranks for which each rank gets a line

_EXACT = "stock Megatron's to the last bit"
_AMONG_SLICES = (
    "stock Megatron's but for rounding; to the last bit those of other schedules of these slices"
)
_UNDER_MEGATRON = "makespan under Megatron"
_ROUNDED = "stock Megatron's but for rounding: sums are made in another order"


@with_schedule_options
def simulate(
    spec: SpecArgument,
    pp: Ranks,
    microbatches: Microbatches,
    costs: CostsText = UNIT,
    memory_limit: Limit = None,
    rank_speeds: Speeds = None,
    *,
    schedules: dict[str, str | bool],
    as_json: Json = False,
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            max=1000,
            help="Number of consecutive steps in the picture, the page and the file of --perfetto.",
        ),
    ] = 1,
    certify: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=LONGEST,
            metavar="SECONDS",
            help="Time to search for a lower bound of the makespan. Prints by how much, at most, "
            "the makespan of another schedule could be shorter than this one's.",
        ),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(
            help=(
                "Random variation of the passes' times: 0.1 (standard deviation as a share of each "
                "time), 0.1,ranks=0.05 (adds a factor per rank and step, with deviation 0.05), "
                "or a trace, whose measured variation is used. Default: none."
            )
        ),
    ] = None,
    microbatch_costs: Annotated[
        str | None,
        typer.Option(
            metavar="lognormal:DEVIATION|FILE",
            help=(
                "Costs of microbatches that differ: lognormal:0.5 (20 random steps with this "
                "standard deviation of the tokens, as a share of the mean), or a file. A line of "
                "it has the lengths of a microbatch's documents, or its cost, step after step. "
                "Attention (attention= in COSTS) grows with squared lengths. Prints what is gained "
                "by ordering the microbatches, by dealing them to replicas, and by a schedule made "
                "for the mean cost at each position in the step. Output files show the best of "
                "these."
            ),
        ),
    ] = None,
    deal: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="REPLICAS",
            help="Number of data-parallel replicas to which microbatches of --microbatch-costs are "
            "dealt.",
        ),
    ] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Draw the schedule's timeline below the timeline of 1F1B into this .svg or .png "
                "file. With --post-validation or --overlap-moe-expert-parallel-comm, the upper "
                "timeline is that of the same schedule without the option."
            )
        ),
    ] = None,
    page: HtmlPage = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Write the timeline into this .json file, for ui.perfetto.dev."),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Write the compute actions into this .csv file, a line per rank. Such a "
            "file can be given as SPEC and to --pipeline-schedule."
        ),
    ] = None,
    torch_csv: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Write the compute actions into this .csv file for torch.distributed.pipelining "
                "and torchtitan, where the first stage of a V is on rank 0."
            )
        ),
    ] = None,
    program_file: Annotated[
        Path | None,
        typer.Option(
            "--program",
            help=(
                "Write all actions into this text file, a line per rank, in their order: passes, "
                "sends, receives, waits, collectives and copies."
            ),
        ),
    ] = None,
) -> None:
    """Predict the time of a step under a schedule, and the memory of each rank.

    The makespan is the time from the first start to the last end over all ranks: the time of a
    step. The span is the longest time of a single rank: the time of a step if steps overlap. The
    makespan if passes wait is the worst case: every pass waits for all messages posted before it.
    All three hold for our executor. For 1f1b and interleaved, the makespan under Megatron's own
    executor, which waits for messages more often, is printed too.
    With --noise the times of passes vary, and their order stays.
    """
    try:
        config, options = config_and_options(
            schedules, memory_limit=memory_limit, rank_speeds=rank_speeds
        )
        _check_options(options, csv=csv, torch_csv=torch_csv, certify=certify)
        if steps > 1 and all(file is None for file in (plot, page, perfetto)):
            raise ValueError(
                f"--steps {steps}: several steps are only shown in a picture, a page or a file of "
                "--perfetto; add --plot, --html or --perfetto, or drop --steps"
            )
        files = SimulationFiles(csv, torch_csv, program_file, perfetto, plot, page)
        files.check()
        varying = None if noise is None else parse_noise(noise)
        differing = _differing(microbatch_costs, microbatches, deal)
        with showing_progress():
            speeds = () if config.rank_speeds is None else config.rank_speeds.of_ranks(pp)
            request = _Request(pp, microbatches, costs, memory_limit, options, speeds)
            resolved, problem, why = request.resolve(spec)
            program, made = report(resolved, problem, Variant(resolved, problem).build)
            with task("simulating a device that waits at passes"):
                waiting = simulate_program(program, program.problem.costs, Device.WAITS_AT_PASSES)
            unequal, drawn = _with_unequal(program, differing, deal)
            more = _More(
                makespan_under_megatron=_under_megatron(program, resolved),
                certificate=None if certify is None else certify_program(program, certify),
                noise=None if varying is None else spread(program, varying),
                unequal_microbatches=unequal,
            )
        at_places = drawn.problem.costs.at_places
        problem = replace(problem, costs=replace(problem.costs, at_places=at_places))
        files.write(resolved, problem, drawn, steps)
    except (ValueError, OSError) as error:
        fail(error)
    if as_json:
        figures = made.as_data() | {"makespan_if_passes_wait": waiting.makespan}
        typer.echo(json.dumps(figures | more.as_data(), indent=2))
        return
    if why:
        typer.echo(f"{spec} takes {resolved.spec}: {why}")
    rows = {**_of_schedule(made), "makespan if passes wait": waiting.makespan, **more.rows()}
    print_table([{"": name, resolved.spec: value} for name, value in rows.items()])
    typer.echo(f"times are in the unit of the costs ({costs})")
    if more.certificate is not None:
        typer.echo(_bound(more.certificate, made))
    if options.steps_overlap:
        typer.echo(what_overlapping_gains(program))
    files.name(program)


def _under_megatron(program: Program, resolved: ResolvedSpec) -> float | None:
    """Return the makespan of ``program`` under Megatron's own executor; None if it cannot run."""
    problem = run_by_stock(program.problem, resolved.spec, STOCK_EXECUTOR)
    by_megatron = prove_built(program.schedule, problem)
    if not by_megatron.is_run_by_stock:
        return None
    return simulate_program(by_megatron, problem.costs).makespan


@dataclass(frozen=True)
class _More:
    """Numbers that only some options add to the report; None for those that are not requested."""

    makespan_under_megatron: float | None
    certificate: Certificate | None
    noise: Spread | None
    unequal_microbatches: UnequalMicrobatches | None

    def as_data(self) -> dict[str, Any]:
        others = {"noise": self.noise, "unequal_microbatches": self.unequal_microbatches}
        made = {name: asdict(one) for name, one in others.items() if one is not None}
        under_megatron = {"makespan_under_megatron": self.makespan_under_megatron}
        return under_megatron | _certified(self.certificate) | made

    def rows(self) -> dict[str, Any]:
        """Return the rows that these numbers add to the printed report, by name."""
        rows: dict[str, Any] = {}
        if self.makespan_under_megatron is not None:
            rows[_UNDER_MEGATRON] = self.makespan_under_megatron
        if self.noise is not None:
            rows |= rows_of_spread(self.noise)
        return rows | _of_unequal(self.unequal_microbatches)


@dataclass(frozen=True)
class _Request:
    """Problem that the options of ``megatron-ext simulate`` describe, without its placement."""

    ranks: int
    microbatches: int
    costs: str
    limit: str | None
    options: ScheduleOptions
    speeds: tuple[float, ...] = ()

    def resolve(self, spec: str) -> tuple[ResolvedSpec, Problem, str]:
        """Return the schedule that ``spec`` names, its problem, and why it was chosen.

        The reason is "" if ``spec`` names one schedule. Otherwise the schedule is the one with the
        shortest step.

        Raises:
            ValueError: ``spec`` names no schedule, or none of those that it names can be made.
        """
        searches = auto_searches(spec) or ()
        if len(searches) < 2:
            resolved = choose(spec)
            return resolved, self.problem(resolved), ""
        # All searches get a common memory limit, as each would choose a limit of its own.
        within = self if self.limit is not None else replace(self, limit=AS_1F1B)
        taken = take(searches, within.problem)
        resolved = choose(taken.spec)
        return resolved, within.problem(resolved), taken.why

    def problem(self, resolved: ResolvedSpec) -> Problem:
        placement = resolved.place(self.ranks)
        limit = None
        if self.limit is not None:
            limit = parse_limit(self.limit, self.ranks, self.microbatches)
        costs = at_speeds(parse_costs(self.costs, placement), placement, self.speeds)
        return Problem(placement, self.microbatches, costs, limit, options=self.options)


def _of_schedule(made: ScheduleReport) -> dict[str, Any]:
    """Return the rows of the printed report ``made``, by name, without options not requested."""
    rows: dict[str, Any] = {
        "pipeline ranks": made.pp,
        "stages of a rank": made.vpp,
        "microbatches": made.microbatches,
    }
    if made.slices > 1:
        slices = made.options.slices
        joined = ", their W joined" if slices.joined_weights else ""
        rows["slices of a microbatch"] = f"{slices.count}, {slices}{joined}"
    for name in made.options.requested:
        if name not in ("slices", "pairs"):  # these have rows of their own
            value = getattr(made.options, name)
            rows[made.options.name_of(name)] = "yes" if value is True else value
    if made.memory_limit is not None:
        rows["memory limit"] = made.memory_limit
    rows["makespan"] = made.makespan
    rows["span"] = made.span
    if made.options.steps_overlap:
        rows["step, where steps overlap"] = made.step
    rows["compute of a rank"] = made.work
    rows["bubble"] = (
        f"{made.bubble_share_makespan:.1%} of the makespan, {made.bubble_share_span:.1%} of the "
        f"span"
    )
    rows["peak activations"] = _of_ranks(made.peak_activation_microbatches)
    if made.offloads:
        rows["peak on the host"] = _of_ranks(made.host_microbatches)
    if made.recomputed:
        rows["recomputed"] = f"{made.recomputed:.0%} of the activations"
    if made.pairs:
        rows["pairs of passes"] = f"{made.pairs} of {made.microbatches * made.pp * made.vpp}"
    rows["results"] = _results(made)
    rows["made in"] = f"{made.generation_seconds:.2g} s"
    return rows


def _results(made: ScheduleReport) -> str:
    if made.slices == 1:
        exact = _EXACT
        if made.schedule.split(":")[0] == "interleaved" and made.microbatches % made.pp:
            exact += f" (its own interleaved schedule refuses {made.microbatches} microbatches)"
        return exact if made.bitwise_order else _ROUNDED
    return _AMONG_SLICES if made.bitwise_order else _ROUNDED


def _of_ranks(held: Sequence[float]) -> str:
    """Return text on how many microbatches' activations each rank holds."""
    most = max(held)
    if min(held) == most:
        return f"{counted(most, 'microbatch')} on every rank"
    if len(held) > MOST_RANKS:
        return f"{min(held):g} to {counted(most, 'microbatch')} on a rank"
    return f"{', '.join(f'{amount:g}' for amount in held)} microbatches, rank by rank"


def _bound(certificate: Certificate, made: ScheduleReport) -> str:
    others = "this placement and backward pass"
    if made.memory_limit is not None:
        others = "this placement, backward pass and memory limit"
    if certificate.optimal:
        return f"proved: no schedule with {others} has a shorter makespan"
    bound = (
        f"no schedule with {others} has a makespan under {certificate.lower_bound:.6g}, which is "
        f"{certificate.gap:.1%} less"
    )
    if certificate.excluded_period is None:
        return bound
    return (
        f"{bound}\nno V within {made.memory_limit} repeats the passes of one microbatch every "
        f"{certificate.excluded_period:g} or less (proved; those of several may come together, and "
        f"more often)"
    )


# Options for which torch.distributed.pipelining has no passes.
_NOT_TORCHS = ("vocab_parallel", "activation_offload", "recompute", "steps_overlap")


def _check_options(
    options: ScheduleOptions, *, csv: Path | None, torch_csv: Path | None, certify: float | None
) -> None:
    """Raise ValueError if a file or --certify does not go with the ``options`` of the schedule."""
    vocabulary = options.vocab_parallel
    if csv is not None and vocabulary is not VocabularyParallel.NONE:
        raise ValueError(
            f"--csv: with {option('vocab_parallel')} {vocabulary} the table would contain the "
            "passes of vocabulary parallelism, which are added a second time when the table is "
            f"read: drop --csv or {option('vocab_parallel')}"
        )
    # The oldest typer that setup.py allows accepts nan, which is neither below the least nor above
    # the largest permitted value.
    if certify is not None and math.isnan(certify):
        raise ValueError(f"'--certify' is {certify}: write a number of seconds up to {LONGEST:g}")
    if certify is not None and options.pairs:
        raise ValueError(
            "--certify computes a lower bound for passes that run one after the other, and with "
            f"{OVERLAP} passes overlap: drop --certify or {OVERLAP}"
        )
    if certify is not None and options.steps_overlap:
        late = option("post_validation")
        raise ValueError(
            "--certify computes a lower bound of the makespan (first start to last end over all "
            f"ranks), and with {late} a step takes only the span (the longest time of one rank): "
            f"drop --certify or {late}"
        )
    if torch_csv is None:
        return
    if wrong := [option(setting_of(name)) for name in _NOT_TORCHS if options.requests(name)]:
        names = ", ".join(wrong)
        raise ValueError(
            f"--torch-csv: torch.distributed.pipelining has no passes for {names}; drop "
            f"--torch-csv, or {names}"
        )


def _certified(certificate: Certificate | None) -> dict[str, float | None]:
    if certificate is None:
        return {}
    return {
        "lower_bound": certificate.lower_bound,
        "gap": certificate.gap,
        "optimal": certificate.optimal,
        "excluded_period": certificate.excluded_period,
    }


def _differing(text: str | None, microbatches: int, replicas: int) -> MicrobatchLoads | None:
    """Return the unequal microbatches of --microbatch-costs; None if that is not given.

    Raises:
        ValueError: ``text`` is not understood, or it is None and there are several ``replicas``.
    """
    if text is None:
        if replicas > 1:
            raise ValueError(
                f"--deal {replicas}: only microbatches of unequal cost are dealt to replicas; add "
                "--microbatch-costs, or drop --deal"
            )
        return None
    return parse_microbatch_costs(text, microbatches * replicas)


def _with_unequal(
    program: Program, loads: MicrobatchLoads | None, replicas: int
) -> tuple[UnequalMicrobatches | None, Program]:
    """Return statistics of steps of unequal microbatches, and the program that suits them better.

    The program has the mean costs of the microbatches at each position of the step. If ``loads`` is
    None, the statistics are None and the program is ``program``.
    """
    if loads is None:
        return None, program
    costs = loads.costs(program.problem.costs)
    unequal, for_profile = judged_for_places(program, costs, replicas)
    if for_profile is not None and unequal.keeps_profile:
        return unequal, for_profile
    return unequal, at_places_of(program, profile_of(costs, replicas))


def _of_unequal(unequal: UnequalMicrobatches | None) -> dict[str, Any]:
    """Return the printed rows on unequal microbatches, by name; none if ``unequal`` is None."""
    if unequal is None:
        return {}
    printed = {
        "makespan, unequal microbatches": f"{unequal.arrival:.6g}, median of "
        f"{counted(unequal.steps, 'step')}",
        "ordered, small ends": _of_arrival(unequal.ordered, unequal),
    }
    if unequal.replicas > 1:
        printed["and dealt"] = _of_arrival(unequal.dealt, unequal)
    if unequal.profile is not None:
        kept = "kept" if unequal.keeps_profile else "the one above is kept"
        printed["and a program for the places"] = f"{_of_arrival(unequal.profile, unequal)}; {kept}"
    return printed


def _of_arrival(makespan: float, unequal: UnequalMicrobatches) -> str:
    return f"{makespan:.6g}, {makespan / unequal.arrival:.3f} of that"
