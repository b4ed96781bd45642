"""The recipes that let experts' messages go on beside other microbatches, and what pairs give."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_ext.adapter.layers import layout_of
from megatron_ext.schedule.model.gpus import DATA_SHEETS, GPUS
from megatron_ext.schedule.plan.layouts.layout import Layout, evenly
from scripts.recipes.configured import configuration_of
from scripts.recipes.gains import USED, Configuration, work_of
from scripts.recipes.pairs.compared import Comparison, Step, with_overlap
from scripts.recipes.recipe import Recipe

FLAG = "overlap_moe_expert_parallel_comm"
SHARES = (0.25, 0.5, 1.0)  # of experts' messages, that can go on beside other work
_STOCK_CHUNKS = (2, 3, 4)
_OURS = ("zb-v", "dualpipe-v", "interleaved-zb:vpp=2")
_WITHOUT = ("zb-2p", *_OURS)  # which hide nothing


@dataclass(frozen=True)
class Candidate:
    """A recipe that is compared.

    Attributes:
        mended: what had to change for Megatron to take it, in words; "" for nothing.
    """

    name: str
    configuration: Configuration
    mended: str = ""


@dataclass(frozen=True)
class Found:
    """Steps with pairs.

    Attributes:
        share: of `SHARES`.
        own: the recipe as it stands.
        stock: Megatron's interleaved schedule with its own overlap, at its best.
        ours: our schedules with pairs, at their best.
    """

    share: float
    own: Step
    stock: Step
    ours: Step | None


@dataclass(frozen=True)
class Result:
    """Of a recipe: steps with pairs, and the best without any, of stock and of ours."""

    candidate: Candidate
    found: tuple[Found, ...]
    stock_without: Step | None
    ours_without: Step | None

    def as_data(self) -> dict[str, Any]:
        """For other programs."""
        return {
            "recipe": self.candidate.name,
            "mended": self.candidate.mended,
            "found": [asdict(found) for found in self.found],
            "stock_without": self.stock_without and asdict(self.stock_without),
            "ours_without": self.ours_without and asdict(self.ours_without),
        }


def candidates_of(recipes: Iterable[Recipe]) -> tuple[list[Candidate], list[str]]:
    """Those of ``recipes`` with the flag and without graphs of whole iterations, and the names of
    those among them that cannot be compared."""
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


def compare(candidate: Candidate) -> Result:
    """Raises ValueError where its own line cannot be planned."""
    configuration = candidate.configuration
    room = USED * DATA_SHEETS[configuration.gpu].memory
    rates = GPUS[configuration.gpu].rates(configuration.execution.precision)
    own = Layout(configuration.layers)
    chunks = sorted({*_STOCK_CHUNKS, own.stages // configuration.ranks})
    stocks = [f"interleaved:vpp={number}" for number in chunks]
    found = []
    for share in SHARES:
        stock_work, our_work = (
            with_overlap(configuration, rates, share, is_stock=is_stock)
            for is_stock in (True, False)
        )
        of_own = Comparison(stock_work, None).step(configuration.schedule, own)
        bound = max(room, of_own.fullest)
        stock = Comparison(stock_work, bound).best(stocks, [own])
        ours = Comparison(our_work, bound).best(_OURS, [own])
        if stock is None or stock.seconds > of_own.seconds:
            stock = of_own
        found.append(Found(share, of_own, stock, ours))
    without = Comparison(work_of(configuration, configuration.execution), bound, without=True)
    return Result(
        candidate,
        tuple(found),
        without.best(["1f1b", *stocks], [own]),
        without.best(_WITHOUT, [own]),
    )
