"""The table of docs/pairs.md on public recipes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scripts.recipes.pairs.compared import Step
from scripts.recipes.pairs.recipes import Found, Result
from scripts.recipes.tables import table

_COLUMNS = (
    *("recipe", "p", "m", "hides", "own line", "stock in pairs", "ours in pairs", "gain"),
    *("stock alone", "ours alone"),
)


def page(results: Sequence[Result]) -> str:
    """Seconds of a step, by recipe and by how much of experts' messages hides. The gain is that of
    ours over the best of stock, with pairs or alone."""
    rows = [row for result in results for row in _rows(result)]
    mended = [f"- {r.candidate.name}: {r.candidate.mended}" for r in results if r.candidate.mended]
    parts = [table(_COLUMNS, rows)]
    if mended:
        parts += ["\nMegatron refuses these as they stand; compared:\n", *mended]
    return "\n".join(parts)


def _rows(result: Result) -> Iterable[Sequence[str]]:
    configuration = result.candidate.configuration
    for number, found in enumerate(result.found):
        is_first = number == 0
        yield (
            result.candidate.name if is_first else "",
            str(configuration.ranks) if is_first else "",
            str(configuration.microbatches) if is_first else "",
            f"{found.share:g}",
            f"{found.own.seconds:.4g}",
            _step(found.stock),
            _step(found.ours),
            f"{gain(found, result.stock_without):.3f}" if found.ours else "",
            _step(result.stock_without) if is_first else "",
            _step(result.ours_without) if is_first else "",
        )


def _step(step: Step | None) -> str:
    return "none fits" if step is None else f"{step.seconds:.4g} {step.schedule}"


def gain(found: Found, without: Step | None) -> float:
    """How much more time stock's best step takes, as a multiple of ours.

    Args:
        without: stock's best without pairs.
    """
    assert found.ours is not None
    stock = min(found.stock.seconds, without.seconds if without else found.stock.seconds)
    return stock / found.ours.seconds
