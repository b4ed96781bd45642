"""Recipes that overlap experts' messages with other microbatches, and the gain of pairs for
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

from megatron_ext.adapter.layers import layout_of
from megatron_ext.cost_model.gpus import GPUS
from megatron_ext.planner.layouts.layout import Layout, evenly
from scripts.recipes.configured import configuration_of
from scripts.recipes.gains import PROCESSES, Configuration, room_of, work_of
from scripts.recipes.pairs.compared import Comparison, Step, with_overlap
from scripts.recipes.recipe import Recipe

FLAG = "overlap_moe_expert_parallel_comm"
SHARES = (0.25, 0.5, 1.0)  # of experts' messages, that can go on beside other work
_STOCK_CHUNKS = (2, 3, 4)
_ON_V = ("zb-v", "dualpipe-v")


@dataclass(frozen=True)
class Candidate:
    """A recipe that is compared.

    Attributes:
        mended: changes that Megatron required to accept it, in words; "" if there are none.
    """

    name: str
    configuration: Configuration
    mended: str = ""


@dataclass(frozen=True)
class Crossed:
    """A schedule with the layout that is best in pairs, and with the one that is best alone.

    Attributes:
        serial: layers of each stage of the latter.
        in_pairs: seconds of a step with each, in pairs.
        alone: seconds of a step with each, without pairs.
    """

    schedule: str
    serial: tuple[int, ...]
    in_pairs: tuple[float, float]
    alone: tuple[float, float]


@dataclass(frozen=True)
class Found:
    """Steps with pairs.

    Attributes:
        share: one of `SHARES`.
        own: the recipe as it stands.
        stock: Megatron's interleaved schedule with its own overlap, at its best.
        ours: our schedules with pairs, at their best.
        each: each of our schedules alone.
        stock_crossed, ours_crossed: these two with layouts made without pairs.
    """

    share: float
    own: Step
    stock: Step | None
    ours: Step | None
    each: tuple[Step, ...]
    stock_crossed: Crossed | None
    ours_crossed: Crossed | None


@dataclass(frozen=True)
class Result:
    """Result for a recipe: steps with pairs, and the best without pairs, of stock and of ours,
    within ``bound`` bytes of a rank."""

    candidate: Candidate
    found: tuple[Found, ...]
    stock_without: Step | None
    ours_without: Step | None
    bound: float

    def as_data(self) -> dict[str, Any]:
        """Return the result as data for other programs."""
        return {
            "recipe": self.candidate.name,
            "mended": self.candidate.mended,
            "bound": self.bound,
            "found": [asdict(found) for found in self.found],
            "stock_without": self.stock_without and asdict(self.stock_without),
            "ours_without": self.ours_without and asdict(self.ours_without),
        }


def candidates_of(recipes: Iterable[Recipe]) -> tuple[list[Candidate], list[str]]:
    """Return those of ``recipes`` with the flag and without graphs of whole iterations, and the
    names of the ones among them that cannot be compared."""
    made, left = [], []
    for recipe in recipes:
        settings = recipe.settings
        if not settings.get(FLAG) or settings.get("cuda_graph_impl") == "full_iteration":
            continue
        try:
            made.append(_candidate(recipe))
        except ValueError as error:
            left.append(f"{recipe.name}: {' '.join(str(error).split())}")
    return made, left


def _candidate(recipe: Recipe) -> Candidate:
    name = recipe.name.rpartition(":")[2].removesuffix("_config")
    try:
        return Candidate(name, configuration_of(recipe))
    except ValueError:
        settings, mended = dict(recipe.settings), "without moe_shared_expert_overlap"
        if settings.pop("moe_shared_expert_overlap", None) is None:
            mended = "layers as evenly as they go"
            layers = int(settings.get("num_layers") or recipe.dimensions["num_layers"])
            stages = recipe.ranks * int(settings.pop("virtual_pipeline_model_parallel_size"))
            layout = layout_of(list(evenly(layers, stages).layers), settings["mtp_num_layers"] or 0)
            settings["pipeline_model_parallel_layout"] = layout
        return Candidate(name, configuration_of(replace(recipe, settings=settings)), mended)


def compare_all(candidates: Sequence[Candidate], report: Callable[[], None]) -> list[Result]:
    """Return the results of all candidates, computed in `PROCESSES` processes; ``report`` is called
    after each."""
    results = []
    with get_context("spawn").Pool(PROCESSES) as pool:
        for result in pool.imap(compare, candidates):
            results.append(result)
            report()
    return results


def compare(candidate: Candidate) -> Result:
    """Raise ValueError where its own command cannot be planned."""
    configuration = candidate.configuration
    rates = GPUS[configuration.gpu].rates(configuration.execution.precision)
    own = Layout(configuration.layers)
    chunks = sorted({*_STOCK_CHUNKS, own.stages // configuration.ranks})
    stocks = [f"interleaved:vpp={number}" for number in chunks]
    loops = dict.fromkeys([2, own.stages // configuration.ranks])
    ours = [*_ON_V, *(f"interleaved-zb:vpp={number}" for number in loops)]
    works = [
        (
            with_overlap(configuration, rates, share, is_stock=True),
            with_overlap(configuration, rates, share, is_stock=False),
        )
        for share in SHARES
    ]
    of_own = [
        Comparison(of_stock, None, ()).step(configuration.schedule, own) for of_stock, _ in works
    ]
    # One for all, within which the recipe is as it stands.
    work_alone = work_of(configuration, configuration.execution)
    bound = max(room_of(configuration, work_alone), *(step.fullest for step in of_own))
    alone = (
        Comparison(work_alone, bound, ["1f1b", *stocks]),
        Comparison(work_alone, bound, ["zb-2p", *ours]),
    )
    in_pairs = [
        (Comparison(of_stock, bound, stocks), Comparison(of_ours, bound, ours))
        for of_stock, of_ours in works
    ]
    _search([alone, *in_pairs], own)
    found = [
        Found(
            share,
            step,
            of_stock.simulated(),
            of_ours.simulated(),
            tuple(of_ours.found.values()),
            _crossed(of_stock, alone[0]),
            _crossed(of_ours, alone[1]),
        )
        for share, step, (of_stock, of_ours) in zip(SHARES, of_own, in_pairs, strict=True)
    ]
    return Result(candidate, tuple(found), alone[0].simulated(), alone[1].simulated(), bound)


def _search(compared: Sequence[Sequence[Comparison]], own: Layout) -> None:
    """Search all comparisons with the same effort. Each begins also with the recipe's ``own``
    layout and those found before, and in the end continues from the layouts that any other has
    found."""
    known = [own]
    for sides in compared:
        for side in sides:
            side.start(known)
        known += [layout for side in sides for layout in side.layouts]
    for sides in compared:
        for side in sides:
            side.go_on_from(known)


def _crossed(in_pairs: Comparison, alone: Comparison) -> Crossed | None:
    """Return the comparison of the best schedule ``in_pairs``."""
    best = in_pairs.best
    of_alone = best and alone.of(best.schedule, Layout(best.layers))
    if best is None or of_alone is None:
        return None
    knowing, serial = Layout(best.layers), Layout(of_alone.layers)
    return Crossed(
        best.schedule,
        serial.layers,
        in_pairs=(best.seconds, in_pairs.step(best.schedule, serial).seconds),
        alone=(alone.step(best.schedule, knowing).seconds, of_alone.seconds),
    )
