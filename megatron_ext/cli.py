"""The commands of ``megatron-ext``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from megatron_ext.bench import (
    DEFAULT_SCHEDULES,
    STEPS,
    STEPS_IN_A_ROW,
    Measured,
    Setting,
    draw_report,
    measure,
)
from megatron_ext.config import PipelineConfig
from megatron_ext.schedule.build import build_program
from megatron_ext.schedule.certify import certify as certified
from megatron_ext.schedule.choose import Candidate, Plan, Way, make_plan
from megatron_ext.schedule.costs import parse_costs, uniform
from megatron_ext.schedule.draw import draw_plan, draw_steps
from megatron_ext.schedule.estimate import GPU
from megatron_ext.schedule.gpus import GPUS, USABLE, Gpu, parse_gpu
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.model import parse_model
from megatron_ext.schedule.model_memory import TrainingState
from megatron_ext.schedule.model_plan import Training
from megatron_ext.schedule.overlap import what_overlapping_gains
from megatron_ext.schedule.recommendation import recommendation, slower_by
from megatron_ext.schedule.registry import choose, entries, with_option
from megatron_ext.schedule.report import report
from megatron_ext.schedule.schedule import (
    P2P,
    Offload,
    Problem,
    VocabularyParallel,
    from_csv,
    to_csv,
)
from megatron_ext.schedule.simulate import simulate_steps
from megatron_ext.schedule.summary import program_of_1f1b
from megatron_ext.schedule.timeline import Timeline
from megatron_ext.schedule.trace import read_trace, write_trace
from megatron_ext.schedule.trace_report import trace_report
from megatron_ext.schedule.verify import Program
from megatron_ext.schedule.vocabulary_plan import cases, side_by_side

app = typer.Typer(
    help="Better pipeline schedules for stock Megatron-LM. To train: "
    "python -m megatron_ext SCRIPT ARGS --pipeline-schedule NAME",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object or list.")]
Schedule = Annotated[
    str, typer.Argument(metavar="SPEC", help="NAME[:key=value,...] or a .csv or .py file")
]

Ranks = Annotated[int, typer.Option(help="Pipeline ranks.")]
Microbatches = Annotated[int, typer.Option("-m", "--microbatches", help="Of one step.")]
CostsText = Annotated[
    str,
    typer.Option(
        help="f=10,i=12,w=8,comm=1 per microbatch of a rank, head=5/6/4,embedding=1/1 for all of "
        "the output layer and of the embedding beside them; or a JSON file"
    ),
]
UNIT = "f=1,i=1,w=1,comm=0"
Limit = Annotated[str | None, typer.Option(help="5, 0.5x or 60GiB")]
PostValidation = Annotated[
    bool,
    typer.Option(
        "--post-validation", help="Overlap steps: the optimizer steps before all ranks are done."
    ),
]


def fail(error: Exception) -> NoReturn:
    """End a command with status 2 and the error's text."""
    typer.echo(f"megatron-ext: error: {error}", err=True)
    raise typer.Exit(2)


@app.command()
def schedules(as_json: Json = False) -> None:
    """List the schedules there are."""
    rows = [
        {
            "name": entry.name,
            "placement": entry.place(4).name,
            "chunks": entry.place(4).chunks,
            "uses_costs": entry.uses_costs,
            "runnable": True,
            "source": entry.source,
        }
        for entry in entries().values()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    _print_table(rows)


@app.command()
def simulate(
    spec: Schedule,
    pp: Ranks,
    microbatches: Microbatches,
    costs: CostsText = UNIT,
    memory_limit: Limit = None,
    as_json: Json = False,
    vpp: Annotated[int | None, typer.Option(help="Chunks of a rank, for loops.")] = None,
    p2p: Annotated[P2P, typer.Option(help="How messages share communicators.")] = P2P.ASYNC,
    vocab_parallel: Annotated[
        VocabularyParallel,
        typer.Option(help="How embedding and output layer are divided over the ranks."),
    ] = VocabularyParallel.NONE,
    offload: Annotated[
        Offload, typer.Option(help="What leaves for host memory; give d2h= (and h2d=) in COSTS.")
    ] = Offload.NONE,
    post_validation: PostValidation = False,
    steps: Annotated[
        int, typer.Option(min=1, help="Consecutive ones, in what --plot and --trace write.")
    ] = 1,
    certify: Annotated[
        bool, typer.Option("--certify", help="Bound the best there can be.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="What --certify may search.")] = 60.0,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw it beneath 1F1B, or with post-validation beneath itself without it, as .svg "
            "or .png."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write its compute actions.")] = None,
) -> None:
    """Predict how long a schedule takes and what it holds."""
    try:
        if csv is not None and vocab_parallel is not VocabularyParallel.NONE:
            raise ValueError(
                f"--csv writes a table to which the passes of --vocab-parallel {vocab_parallel} "
                f"would be added a second time when it is read: leave one of them out"
            )
        if certify and post_validation:
            raise ValueError(
                "--certify bounds the makespan, and with --post-validation a step costs the span: "
                "leave one of them out"
            )
        choice = choose(spec if vpp is None else with_option(spec, "vpp", vpp))
        placement = choice.place(pp)
        limit = parse_limit(memory_limit, pp, microbatches) if memory_limit else None
        problem = Problem(
            placement,
            microbatches,
            parse_costs(costs, placement),
            limit,
            p2p=p2p,
            vocabulary=vocab_parallel,
            offload=offload,
            post_validation=post_validation,
        )
        program, result = report(choice, problem)
        if certify:
            certificate = certified(program, seconds)
            result |= {
                "lower_bound": certificate.lower_bound,
                "gap": certificate.gap,
                "optimal": certificate.optimal,
            }
        if csv is not None:
            csv.write_text(to_csv(program.schedule))
        if trace is not None:
            write_trace(_steps(program, steps), trace)
        if plot is not None:
            beside = program_of_1f1b(problem)
            if post_validation:
                beside = build_program(choice, replace(problem, post_validation=False))
            draw_steps([_steps(beside, steps), _steps(program, steps)], plot)
    except (ValueError, OSError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    _print_table([{"": key, spec: value} for key, value in result.items()])
    if post_validation:
        typer.echo(what_overlapping_gains(program))
    if plot is not None:
        typer.echo(f"picture: {plot}")


def _steps(program: Program, steps: int) -> tuple[Timeline, ...]:
    return simulate_steps(program, program.problem.costs, steps)


@app.command()
def verify(file: Annotated[Path, typer.Argument(help="Compute actions, a line per rank.")]) -> None:
    """Prove a schedule file: complete, in order, free of deadlock."""
    try:
        choice = choose(str(file))
        schedule = from_csv(file.read_text(), file.name)
        microbatches = 1 + max(action.microbatch for row in schedule.rows for action in row)
        placement = schedule.placement
        problem = Problem(placement, microbatches, uniform(placement, 1, 1, 1))
        _, result = report(choice, problem)
    except (ValueError, OSError) as error:
        fail(error)
    order = "in" if result["bitwise_order"] else "not in"
    typer.echo(
        f"{file} is valid: {placement.ranks} ranks, {placement.stages} stages, {microbatches} "
        f"microbatches, {order} microbatch order, peak "
        f"{max(result['peak_activation_microbatches']):g} microbatches"
    )


@app.command()
def plan(
    pp: Ranks,
    microbatches: Microbatches,
    costs: Annotated[
        str | None,
        typer.Option(help="As of simulate. With --model they are its times, as measured."),
    ] = None,
    memory_limit: Limit = None,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time against memory, as .svg or .png.")
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of the model: compare with Megatron's redistribution, where costs have a head.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="layers=64,hidden=6144,heads=48,sequence=4096,vocabulary=128000 and, where they "
            "differ, micro-batch=1,ffn=,kv-heads=,head-width=,gated=true,tied=true,recompute=true: "
            "estimate times and count memory."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(GPUS)}, or operations=400e12,bytes=40e9,memory=80GiB, as achieved. "
            f"What takes more than {USABLE:.0%} of the memory does not fit."
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 1,
    distributed_optimizer: Annotated[
        bool,
        typer.Option(
            "--distributed-optimizer", help="Its states are shared by the data-parallel ranks."
        ),
    ] = False,
    post_validation: PostValidation = False,
) -> None:
    """Compare every schedule for one model, and say which to take."""
    room = None
    try:
        limit = parse_limit(memory_limit, pp, microbatches) if memory_limit else None
        if model is None:
            if gpu is not None or tp > 1 or dp > 1 or distributed_optimizer:
                raise ValueError(
                    "--gpu, --tp, --dp and --distributed-optimizer say how a model is trained: "
                    "add --model"
                )
            costs_on = partial(parse_costs, costs or UNIT)
            case = cases(pp, microbatches, costs_on, limit, layers, post_validation)
        else:
            if gpu is None and costs is None:
                raise ValueError("--model does not say how fast it runs: add --gpu, or --costs")
            described = parse_model(model)
            layers = described.layers
            machine = Gpu(GPU) if gpu is None else parse_gpu(gpu)
            room = None if machine.memory is None else USABLE * machine.memory
            state = TrainingState(described.tied, dp if distributed_optimizer else 1)
            measured = None if costs is None else partial(parse_costs, costs)
            case = Training(
                described,
                state,
                tp,
                pp,
                microbatches,
                machine.rates,
                limit,
                measured,
                post_validation,
            ).case
        found = make_plan(case, room, may_offload=model is not None, progress=_progress)
        if plot is not None:
            draw_plan(found, plot)
    except (ValueError, OSError) as error:
        fail(error)
    ways = side_by_side(found)
    recommended = recommendation(found, layers)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "choice": found.choice,
                    "pareto": found.pareto,
                    "schedules": found.reports,
                    "refused": found.refused,
                    "vocabulary": ways,
                    "recommended": recommended,
                },
                indent=2,
            )
        )
    else:
        _print_plan(found)
        _print_ways(ways)
        if recommended is not None:
            _print_recommended(recommended)
    if recommended is None:
        fail(ValueError("no schedule fits; the reasons are above"))


def _progress(names: Sequence[str]) -> Iterator[str]:
    console = Console(stderr=True)
    return iter(track(names, "schedules", console=console, transient=True))


def _print_plan(found: Plan) -> None:
    """Each schedule with what is best done about the vocabulary."""
    best = found.best_of_each
    rows = [_plan_row(each, found) for each in best]
    if rows:
        kept = [key for key in rows[0] if any(row[key] is not None for row in rows)]
        _print_table([{key: row[key] for key in kept} for row in rows])
        typer.echo("* none other is both faster and smaller")
    shown = {each.schedule for each in best}
    _print_refusals(
        (name if way is Way.NAIVE else f"{name} ({_VOCABULARY[way]})", why)
        for (name, way), why in found.refusals.items()
        if name not in shown
    )


def _print_refusals(refusals: Iterable[tuple[str, str]]) -> None:
    """One line for all that have the same reason."""
    names: dict[str, list[str]] = {}
    for name, why in refusals:
        names.setdefault(why, []).append(name)
    for why, alike in names.items():
        typer.echo(f"{', '.join(alike)}: {why}", err=True)


def _plan_row(candidate: Candidate, plan: Plan) -> dict[str, Any]:
    assert plan.best is not None
    row, fullest = candidate.report, candidate.fullest
    is_best = candidate is plan.best
    return {
        "schedule": candidate.schedule,
        "vocabulary": _VOCABULARY[candidate.way] if len(plan.ways) > 1 else None,
        "offload": None if candidate.offload is Offload.NONE else candidate.offload.value,
        "step": candidate.step if row["post_validation"] else None,
        "makespan": row["makespan"],
        "": "" if is_best else f"+{slower_by(candidate, plan.best):.1%}",
        "bubble": f"{row['bubble_share_makespan']:.1%}",
        "span": row["span"],
        "peak microbatches": candidate.peak,
        "fullest rank": None if fullest is None else _gib(fullest),
        " ": "choice" if is_best else "*" * (candidate in plan.front),
    }


_VOCABULARY = {
    Way.NAIVE: "",
    Way.REDISTRIBUTED: "layers moved",
    Way.ONE: "divided: 1",
    Way.TWO: "divided: 2",
}


def _print_recommended(recommended: dict[str, Any]) -> None:
    if recommended["ranks"]:
        typer.echo("\nmemory of the choice")
        _print_table(
            [
                {"pipeline rank": rank} | {name: _gib(held) for name, held in row.items()}
                for rank, row in enumerate(recommended["ranks"])
            ]
        )
    typer.echo(f"\nwrite {' '.join(recommended['flags'])}")


def _print_ways(ways: list[dict[str, Any]]) -> None:
    if not ways:
        return
    typer.echo(
        "\nwhat a step costs with the output layer and the embedding on their stages, with layers\n"
        "moved away from them, and with both divided over all ranks (vocabulary parallelism):"
    )
    names = {way: f"vocabulary {way}" if way.isdigit() else way.value for way in Way}
    _print_table(
        [
            {"schedule": row["schedule"]}
            | {
                name: "-" if row[way] is None else row[way]
                for way, name in names.items()
                if way in row
            }
            for row in ways
        ]
    )
    _print_refusals(
        (f"{row['schedule']} ({names[Way(way)]})", why)
        for row in ways
        for way, why in row["refused"].items()
    )


@app.command()
def bench(
    pp: Ranks = 4,
    microbatches: Microbatches = 8,
    costs: Annotated[
        str, typer.Option(help="Milliseconds per microbatch of a rank: f=40,i=40,w=40")
    ] = "f=40,i=40,w=40",
    schedules: Annotated[
        str, typer.Option(help="Ours to measure, separated by blanks.")
    ] = DEFAULT_SCHEDULES,
    launches: Annotated[int, typer.Option(help="How often the ranks are started afresh.")] = 3,
    as_json: Json = False,
    vocab_parallel: Annotated[
        VocabularyParallel,
        typer.Option(
            help="Measure ours with vocabulary parallelism too; give head=F/I/W in COSTS."
        ),
    ] = VocabularyParallel.NONE,
    offload: Annotated[
        Offload, typer.Option(help="Measure ours with offload too; give d2h= in COSTS.")
    ] = Offload.NONE,
    post_validation: Annotated[
        bool,
        typer.Option(
            "--post-validation",
            help="Measure steps in a row, with an all-reduce after each, and ours with the "
            "optimizer's post-validation in its place too.",
        ),
    ] = False,
    bad_every: Annotated[
        int, typer.Option(help="With --post-validation: every so many-th verdict is bad.")
    ] = 0,
    steps: Annotated[
        int | None,
        typer.Option(help=f"Timed in a launch: {STEPS}, or {STEPS_IN_A_ROW} in a row."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the bars, as .svg or .png.")] = None,
) -> None:
    """Measure executors on emulated clocks: ours, Megatron's own, torch's."""
    specs = tuple(schedules.split())
    try:
        setting = Setting(
            pp,
            microbatches,
            costs,
            specs,
            launches,
            vocab_parallel,
            offload,
            steps or (STEPS_IN_A_ROW if post_validation else STEPS),
            post_validation,
            bad_every,
        )
        found = measure(setting, lambda text: typer.echo(text, err=True))
        if plot is not None:
            draw_report(found, plot)
    except (ValueError, OSError) as error:
        fail(error)
    if as_json:
        report = {
            **asdict(setting),
            "rows": [asdict(row) for row in found.rows],
            "autograd_microseconds": found.autograd_microseconds,
            "doubts": found.doubts,
        }
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(
        f"{pp} ranks, {microbatches} microbatches, {costs} ms, {setting.steps} steps a launch"
        f"{', in a row' * post_validation}, {launches} launches; seconds of a step, median over "
        f"launches"
    )
    rows = [_bench_row(row) for row in found.rows]
    if bad_every:
        for cells, row in zip(rows, found.rows, strict=True):
            cells["after a bad verdict, ideal"] = row.ideal_after_bad or ""
            cells["after a bad verdict, measured"] = row.after_bad or ""
    _print_table(rows)
    cold, warm = found.autograd_microseconds
    typer.echo(
        f"autograd alone takes {cold:.0f} us a pass here after a sleep, {warm:.0f} us without one: "
        f"that much of every pass is the machine's"
    )
    for doubt in found.doubts:
        typer.echo(f"not to be believed: {doubt}")


def _bench_row(row: Measured) -> dict[str, Any]:
    return {
        "": row.name,
        "ideal": row.ideal,
        "measured": row.measured,
        "of ideal": f"{row.efficiency:.1%}",
        "over Megatron's 1F1B": f"{row.speedup:.2f}x",
        "spread": f"{row.spread:.1%}",
        "host, us a pass": f"{row.host_microseconds:.0f}",
    }


@app.command()
def trace(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What --pipeline-trace named, or a file of it.")
    ],
    as_json: Json = False,
) -> None:
    """Say where the time of traced steps went, and what cost the most."""
    try:
        found = trace_report(read_trace(folder))
    except ValueError as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    _print_trace(found)


def _print_trace(found: dict[str, Any]) -> None:
    measured, predicted = found["measured"], found["predicted"]
    median = found["iteration"]
    typer.echo(
        f"{found['schedule']} on {found['pp']} ranks, {found['microbatches']} microbatches; "
        f"iteration {median}, the median of {len(found['iterations'])} by its makespan"
    )
    _print_table(
        [
            {"": name.replace("_", " "), "measured": figure(value), "predicted": figure(other)}
            for name, value in measured.items()
            for other in [predicted[name]]
            for figure in [_share if "share" in name else _ms]
        ]
    )
    typer.echo(
        f"prediction: the program's costs, times {found['cost_factor']:.4g}, by which its passes "
        f"take as long as the measured ones; clocks agree to {found['clock_error'] * 1e6:.0f} us"
    )
    typer.echo("\nwhere the makespan went")
    makespan = measured["makespan"]
    _print_table(
        [
            {"": part, "time": _ms(seconds), "of the makespan": _share(seconds / makespan)}
            for part, seconds in found["parts"].items()
        ]
    )
    typer.echo("\nthe largest causes, and what the step would be shorter by without each")
    for number, cause in enumerate(found["causes"], start=1):
        typer.echo(
            f"{number}. {cause['text']}: {_ms(cause['seconds'])} "
            f"({_share(cause['seconds'] / makespan)})"
        )
    if not found["causes"]:
        typer.echo("none stands out: the bubble is the schedule's own")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _share(part: float) -> str:
    return f"{part:.1%}"


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    epilog="Give --pipeline-* flags to see the patches a launch with them would apply, or, behind "
    "--, a whole launch line: megatron-ext doctor --world-size 16 -- SCRIPT ARGS.",
)
def doctor(
    context: typer.Context,
    as_json: Json = False,
    world_size: Annotated[
        int | None, typer.Option(help="Ranks of the launch line, if torchrun's words are not there")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="What a GPU has, as 80GiB, to judge the launch line's by.")
    ] = None,
) -> None:
    """Show the environment and each patch's state, or check a launch line before it is launched."""
    if context.args and (context.args[0] == "-m" or not context.args[0].startswith("-")):
        _check_launch_line(context.args, world_size, gpu_memory, as_json)
    else:
        _show_environment(context.args, as_json)


def _show_environment(words: Sequence[str], as_json: bool) -> None:
    from megatron_ext.config import from_argv
    from megatron_ext.doctor import diagnose

    try:
        config: PipelineConfig = from_argv(words)
    except ValueError as error:
        fail(error)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron misses here is in the table
        found = diagnose(config)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print_table([{"": key, "found": value} for key, value in found["environment"].items()])
        for patch in found["patches"]:
            typer.echo(f"\n{patch['state']}: {patch['how']} {patch['target']}")
            typer.echo(f"  {patch['feature']}: {patch['reason']}")
    if any(patch["state"].startswith("does not fit") for patch in found["patches"]):
        raise typer.Exit(1)


def _check_launch_line(
    words: Sequence[str], world_size: int | None, gpu_memory: str | None, as_json: bool
) -> None:
    from megatron_ext.launch_check import check_launch, read_launch
    from megatron_ext.patches.engine import PatchError

    try:
        report = check_launch(read_launch(words), world_size, gpu_memory)
    except (ValueError, PatchError) as error:
        fail(error)
    if as_json:
        typer.echo(json.dumps(report.as_data(), indent=2))
    else:
        _print_table(
            [
                {"": f.verdict, "what": f.subject, "found": f.text, "what to do": f.fix}
                for f in report.findings
            ]
        )
        if ranks := report.prediction.get("ranks"):
            typer.echo("\npredicted memory")
            _print_table([_memory_row(row) for row in ranks])
        wrong = [f for f in report.findings if f.verdict == "wrong"]
        typer.echo(f"\n{len(wrong) or 'nothing'} {'are' if len(wrong) > 1 else 'is'} wrong")
    if not report.is_right:
        raise typer.Exit(1)


def _memory_row(row: dict[str, Any]) -> dict[str, Any]:
    activations = row["activation_bytes"]
    return {
        "pipeline rank": row["rank"],
        "layers": row["layers"],
        "parameters, gradients, optimizer": _gib(row["model_bytes"]),
        "peak activations": f"{row['activation_microbatches']:g} microbatches",
        "of": "not known" if activations is None else _gib(activations),
        "together": _gib(row["model_bytes"] + (activations or 0)),
    }


def _gib(number: float) -> str:
    return f"{number / 2**30:.3g} GiB"


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))  # no markup
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width of its own
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    return str(value)
