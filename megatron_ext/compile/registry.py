"""Registry of families, and the conversion of a user's ``NAME[:key=value,...]`` into a schedule.

A user names a schedule by a text: a family with options, a search that stands for several, a table,
or a file with a family of their own. All of them become a `ResolvedSpec`, from which placement and
schedule are made. Misspelt names and options are refused with what was probably meant.
"""

from __future__ import annotations

import enum
import functools
import importlib
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_ext.base.progress import remark
from megatron_ext.base.text_file import read_text_file
from megatron_ext.base.words import counted, shown
from megatron_ext.compile.auto_spec import AUTO, auto_searches
from megatron_ext.compile.checked_family import CheckedFamily
from megatron_ext.compile.others_code import code_of
from megatron_ext.compile.size import check_table
from megatron_ext.compile.spec_options import accepted, parameters_of, parse_options, perhaps
from megatron_ext.compile.two_copies.fold import fold
from megatron_ext.compile.two_copies.two_copies import from_rows, holds_two_copies
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Family, Schedule
from megatron_ext.schedule.schedule_csv import from_csv, rows_from_csv


class Maturity(enum.StrEnum):
    """Maturity of a schedule family: how well it is tested, and whether `plan` recommends it.

    All schedules are proved at many sizes in tests, and train there with the results of stock
    Megatron to the last bit.

    - stable: trained in tests together with other features of launches (checkpoints, tensor or
      expert parallelism, vocabulary parallelism, offload); its time and memory are on its page,
      where a test checks them; and it is the best for some launch. Two that are one search with
      different limits count as one.
    - experimental: it may suit a launch, but has hardly been trained together with other features.
    - laboratory: for comparison only. Other schedules take less time in no more memory.
    """

    STABLE = "stable"
    EXPERIMENTAL = "experimental"
    LABORATORY = "laboratory"


@dataclass(frozen=True)
class Traits:
    """Properties of the schedules that a family generates.

    Attributes:
        splits_backward: whether the schedules have separate I and W, not only B.
        uses_costs: whether the schedule depends on the costs.
        searches: whether making a schedule is a search of seconds to minutes.
        steps_overlap: whether post-validation gains time, on more than one rank.
        fits_recompute: whether the family itself chooses the activations to recompute, if recompute
            has to fit into the memory limit.
        takes_slices: whether the family has an order for microbatches that are cut into slices.
        keeps_pairs: whether most F of the steady state can run as one with a backward pass.
    """

    splits_backward: bool = False
    uses_costs: bool = False
    searches: bool = False
    steps_overlap: bool = False
    fits_recompute: bool = False
    takes_slices: bool = False
    keeps_pairs: bool = False


@dataclass(frozen=True)
class FamilyEntry:
    """A registered schedule family, with its name, functions, source and maturity.

    ``build`` makes a schedule from a problem, ``place`` a placement from the number of ranks. Each
    also takes the options of the family that it names as keyword-only parameters. ``at_once`` is
    like ``build``, for families whose ``build`` takes long.
    """

    name: str
    build: Callable[..., Schedule]
    place: Callable[..., Placement]
    source: str
    maturity: Maturity = Maturity.EXPERIMENTAL
    traits: Traits = Traits()
    aliases: tuple[str, ...] = ()
    at_once: Callable[..., Schedule] | None = None


# Stack of lists to which the decorator `family` adds. The first list has the families of
# megatron_ext; while a user's file is imported, its families go into a list above, so that they
# never join the first.
_REGISTERED: list[list[FamilyEntry]] = [[]]


def family(
    name: str,
    place: Callable[..., Placement],
    *,
    source: str,
    maturity: Maturity = Maturity.EXPERIMENTAL,
    aliases: tuple[str, ...] = (),
    at_once: Callable[..., Schedule] | None = None,
    **traits: bool,
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register the decorated function, which makes a schedule, as the schedule family ``name``.

    Args:
        place: function from a number of ranks to the placement.
        source: the paper, and the place in it.
        maturity: how well the family is tested (`Maturity`).
        aliases: other names, torch.distributed.pipelining's among them.
        at_once: for a family that takes long, a function that does not search: the best schedule
            that it has within the same limit. That function is used where steps cannot wait for a
            search.
        traits: fields of `Traits`, such as ``splits_backward=True``.

    Raises:
        TypeError: there is no such trait.
    """
    known = [trait.name for trait in fields(Traits)]
    for trait in traits:
        if trait not in known:
            rest = perhaps(trait, known, f"known are {', '.join(known)}")
            raise TypeError(f"@family({name!r}, ...) has no trait {trait}; {rest}")

    def register(build: Callable[..., Schedule]) -> Callable[..., Schedule]:
        entry = FamilyEntry(
            name, build, place, source, maturity, Traits(**traits), aliases, at_once
        )
        _REGISTERED[-1].append(entry)
        return build

    return register


@functools.cache
def entries() -> dict[str, FamilyEntry]:
    """Return this package's registered schedule families by name, in the order of their files."""
    from megatron_ext import schedule_families as families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")
    ours = {entry.name: entry for entry in _REGISTERED[0]}
    assert len(ours) == len(_REGISTERED[0]), "a family is registered twice"
    return ours


@dataclass(frozen=True)
class ResolvedSpec:
    """A user's choice of schedule before its problem is known: a family with options, or a table.

    ``at_once`` is used where steps cannot wait for a search; None if the choice needs no search.
    """

    spec: str
    place: Callable[[int], Placement]
    build: Family
    traits: Traits
    ranks: int | None = None  # number of ranks for which a table is made; None: any number
    # Number of microbatches for which a table is made; None: any number.
    microbatches: int | None = None
    slices: int | None = None  # number of slices of a microbatch in a table; None: any number
    recomputes: bool = False  # whether the schedule is a table that contains recompute passes
    has_pairs: bool = False  # whether the schedule is a table that contains overlapped passes
    at_once: Family | None = None

    @property
    def takes_long(self) -> bool:
        """Whether the schedule is found by a search, which takes too long to hold up a step."""
        return self.traits.searches or self.at_once is not None

    @property
    def without_search(self) -> ResolvedSpec:
        """This choice with a schedule that needs no search, for steps that cannot wait."""
        if self.at_once is None:
            return self
        traits = replace(self.traits, searches=False)
        return replace(self, build=self.at_once, traits=traits, at_once=None)

    @property
    def example(self) -> Placement:
        """Placement of this schedule on some number of ranks, to show its shape."""
        return self.place(self.ranks or 2)

    @property
    def moves_first_stage(self) -> bool:
        """Whether this schedule has the model's first stage on another rank than rank 0."""
        return self.example.rank_of[0] != 0


def choose(spec: str) -> ResolvedSpec:
    """Return the schedule that ``spec`` names: a family such as ``zb-h1``, or the path of a file.

    A family may have options, as in ``name:key=value,...``. A file is a CSV table, or a Python file
    that registers a family, ``mine.py:key=value,...``. A Python file is imported once in a process,
    however often it is chosen.

    Raises:
        ValueError: no such family, option or file, or a file that is no schedule.
    """
    if spec.lower().endswith(".csv"):
        return _from_csv_file(Path(spec))
    if table := _TABLE_WITH_OPTIONS.fullmatch(spec):
        raise ValueError(f"schedule file {table[1]} is a table and has no options: drop {table[2]}")
    spec = _named(spec)
    entry, options = _entry_and_options(spec)
    # The placement is cached, as Megatron looks up the rank of the first stage several times a
    # microbatch.
    place = functools.cache(functools.partial(entry.place, **accepted(entry.place, options)))
    build = functools.partial(entry.build, **accepted(entry.build, options))
    at_once = entry.at_once and functools.partial(entry.at_once, **accepted(entry.at_once, options))
    return ResolvedSpec(spec, place, build, entry.traits, at_once=at_once)


def _named(spec: str) -> str:
    """Return the schedule name ``spec``; if it is ``auto``, the search that it stands for.

    Raises:
        ValueError: ``auto`` stands for several searches here.
    """
    searches = auto_searches(spec)
    if searches is None:
        return spec
    if len(searches) > 1:
        raise ValueError(
            f"schedule {spec} stands for several searches, among which only a launch or "
            f"'megatron-ext simulate' can choose; write one of {', '.join(searches)}"
        )
    return searches[0]


def entry_of(spec: str) -> FamilyEntry:
    """Return the registered schedule family that ``spec`` names; ``spec`` is no table.

    Raises:
        ValueError: as `choose`.
    """
    return _entry_and_options(_named(spec))[0]


def on_placement(placement: Placement) -> Iterator[ResolvedSpec]:
    """Yield this package's schedule families that can use ``placement`` and need no search."""
    numbers = {"vpp": placement.chunks, "waves": max(placement.chunks // 2, 1)}
    for entry in entries().values():
        spec = entry.name
        for key in parameters_of(entry.place):
            spec = with_option(spec, key, numbers[key])
        resolved = choose(spec)
        is_there = resolved.place(placement.ranks).rank_of == placement.rank_of
        if is_there and not entry.traits.searches:
            yield resolved


def _entry_and_options(spec: str) -> tuple[FamilyEntry, dict[str, Any]]:
    """Return the schedule family that ``spec`` names, and the options given in it.

    ``spec`` is no table.
    """
    if python := _PYTHON_FILE.fullmatch(spec):
        entry, options_text = _from_python_file(Path(python[1])), python[2] or ""
    else:
        name, _, options_text = spec.partition(":")
        entry = _find(name)
    parameters = parameters_of(entry.place) | parameters_of(entry.build)
    return entry, parse_options(entry.name, parameters, options_text)


def options_of(spec: str) -> tuple[frozenset[str], dict[str, Any]]:
    """Return the names of all options of the schedule that ``spec`` names, and the options it
    gives."""
    if spec.lower().endswith(".csv"):
        return frozenset(), {}
    entry, given = _entry_and_options(_named(spec))
    return frozenset(parameters_of(entry.place) | parameters_of(entry.build)), given


def file_of(spec: str) -> Path | None:
    """Return the CSV or Python file that the schedule name ``spec`` gives; None for a family's
    name."""
    python = _PYTHON_FILE.fullmatch(spec)
    if python is not None:
        return Path(python[1])
    return Path(spec) if spec.endswith(".csv") else None


def with_option(spec: str, key: str, value: object) -> str:
    """Return the schedule name ``spec`` with one more option, ``key=value``."""
    return f"{spec}{',' if ':' in spec else ':'}{key}={value}"


# Published names of schedules with two copies of the model, each with the family that is the same
# schedule with one copy on half the ranks.
_TWO_COPIES = {"dualpipe": "dualpipe-v", "ScheduleDualPipe": "dualpipe-v", "DualPipe": "dualpipe-v"}


def _find(name: str) -> FamilyEntry:
    for entry in entries().values():
        if name == entry.name:
            return entry
        if name in entry.aliases:
            return replace(entry, build=_remarking(entry.build, f"{name} is {entry.name} here"))
    if folded := _TWO_COPIES.get(name):
        raise ValueError(
            f"{name} holds two copies of every stage. Half the pipeline ranks with twice the data "
            f"parallelism run the same passes at the same times on the same GPUs: halve "
            f"--pipeline-model-parallel-size and write --pipeline-schedule {folded}"
        )
    known = (
        f"known are {', '.join([*entries(), AUTO])}, or a .csv or .py file; in a launch, 'plan' "
        f"chooses one"
    )
    raise ValueError(f"there is no schedule {shown(name)!r}; {perhaps(name, _all_names(), known)}")


def _remarking(build: Callable[..., Schedule], text: str) -> Callable[..., Schedule]:
    """Return the schedule family's function ``build``, changed to log ``text`` when it is
    called."""

    # The wrapper keeps the signature, from which the family's options are read.
    @functools.wraps(build)
    def remarking(problem: Problem, **options: Any) -> Schedule:
        remark(text)
        return build(problem, **options)

    return remarking


def _all_names() -> list[str]:
    """Return the names of this package's schedule families, ``auto``, and the families' aliases."""
    return [*entries(), AUTO, *(alias for entry in entries().values() for alias in entry.aliases)]


def _from_csv_file(path: Path) -> ResolvedSpec:
    schedule, is_folded = _in_csv_file(path)
    microbatches = schedule.microbatches
    slices = schedule.arrays.slices

    def place(ranks: int) -> Placement:
        if ranks != len(schedule.rows):
            raise ValueError(
                f"schedule file {path} is for {counted(len(schedule.rows), 'rank')}, with a row "
                f"for each, and the pipeline has {ranks}"
            )
        return schedule.placement

    def build(problem: Problem) -> Schedule:
        if problem.microbatches != microbatches:
            raise ValueError(
                f"schedule file {path} is for {counted(microbatches, 'microbatch')}, and this step "
                f"has {problem.microbatches}: change the batch size, or the schedule file"
            )
        if problem.slices.count != slices:
            raise ValueError(
                f"schedule file {path} is for {_counted_slices(slices)} of a microbatch, and this "
                f"step has {_counted_slices(problem.slices.count)}: write --pipeline-slices "
                f"{slices} (--slices {slices} for simulate), or take another schedule file"
            )
        return cut_as_in(problem, schedule)

    if is_folded:
        build = _remarking(
            build,
            f"schedule file {path} holds every stage twice: on the same GPUs that is "
            f"{counted(len(schedule.rows), 'pipeline rank')} with data parallelism doubled, and "
            f"half of its microbatches each; so it is folded",
        )
    kinds = {action.kind for row in schedule.rows for action in row}
    return ResolvedSpec(
        str(path),
        place,
        build,
        Traits(splits_backward=Kind.BACKWARD_WEIGHT in kinds, takes_slices=slices > 1),
        ranks=len(schedule.rows),
        microbatches=microbatches,
        slices=slices,
        recomputes=Kind.RECOMPUTE in kinds,
        has_pairs=bool(schedule.pairs),
    )


def _counted_slices(number: int) -> str:
    return "no slices" if number == 1 else counted(number, "slice")


def cut_as_in(problem: Problem, schedule: Schedule) -> Schedule:
    """Return a schedule from a file, with its slices cut to the lengths of ``problem``'s slices."""
    if problem.slices.count == 1:
        return schedule
    parts = problem.forwards
    rows = tuple(
        tuple(
            a._replace(
                microbatch=parts[a.microbatch] if a.microbatch < len(parts) else a.microbatch
            )
            for a in row
        )
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)


def _in_csv_file(path: Path) -> tuple[Schedule, bool]:
    """Return the schedule in a CSV file, and whether the file holds two copies of every stage.

    A schedule with two copies is folded into one of a single copy.
    """
    text = read_text_file(path, "schedule file")
    check_table(text, f"schedule file {path}")
    rows = rows_from_csv(text, path.name)
    if holds_two_copies(rows):
        return fold(from_rows(rows, path.name)), True
    return from_csv(text, path.name), False


_TABLE_WITH_OPTIONS = re.compile(r"(.+\.csv):(.*)", re.IGNORECASE)
_PYTHON_FILE = re.compile(r"(.+\.py)(?::(.*))?")  # a path may itself contain a colon


def _from_python_file(path: Path) -> FamilyEntry:
    resolved = path.resolve()
    if not resolved.is_file():
        raise ValueError(
            f"there is no schedule file {path}; a relative path starts from the working directory, "
            f"which is {Path.cwd()}"
        )
    return _import_family(resolved)


@functools.cache  # errors are not cached, so a corrected file is read afresh
def _import_family(path: Path) -> FamilyEntry:
    """Return the only schedule family that the user's Python file at ``path`` registers."""
    added = _families_in(path)
    if len(added) != 1:
        names = ", ".join(entry.name for entry in added) or "none"
        raise ValueError(
            f"schedule file {path} registers {len(added)} families ({names}), and a file has to "
            "define one schedule: decorate exactly one function with @family(name, placement, "
            "source=...) of megatron_ext.families"
        )
    entry = added[0]
    for ours in entries().values():
        if entry.name == ours.name or entry.name in ours.aliases:
            raise ValueError(
                f"schedule file {path} registers {entry.name!r}, which is a schedule of "
                "megatron_ext; give it another name"
            )
    try:
        options = parameters_of(entry.place) | parameters_of(entry.build)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"schedule file {path} registers {shown(entry.name)} with something that is no "
            f"function: {shown(error)}; write @family(name, placement, source=...) over a "
            "function of a problem, and as placement a function of a number of ranks"
        ) from None
    for key, option in options.items():
        if not isinstance(option.default, (bool, int, float, str)):
            raise ValueError(
                f"schedule file {path}: option {key} has no default that is a bool, an int, a "
                f"float or a str, from which its type is read; write {key}: int = 0 or the like"
            )
    checked = CheckedFamily(entry.name, path, entry.traits.splits_backward, entry.traits.searches)
    return replace(entry, place=checked.placement(entry.place), build=checked.schedule(entry.build))


def _families_in(path: Path) -> list[FamilyEntry]:
    # This call registers the families of megatron_ext first, so that they do not count as the
    # file's.
    entries()
    # Dataclasses and pickle need a module in which to find the file's classes.
    module = types.ModuleType(str(path))
    module.__file__ = str(path)
    registered: list[FamilyEntry] = []
    _REGISTERED.append(registered)
    sys.modules[module.__name__] = module
    try:
        failed = " cannot be imported"
        with code_of(path, f"importing {path.name}", failed, may_refuse=False):
            exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    finally:
        _REGISTERED.pop()
    return registered
