"""Tables of public recipes with and without pairs of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from scripts.recipes.pairs.compared import Step
from scripts.recipes.pairs.recipes import Crossed, Found, Result
from scripts.tables import table

_NONE_FITS = "none fits"
_COLUMNS = ("recipe", "p", "m", "Megatron in pairs", "alone", "ours in pairs", "alone", "gain")
_OF_LAYOUTS = ("recipe", "schedule", "in pairs", "alone")


def page(results: Sequence[Result]) -> str:
    """Return the page: seconds of a step by recipe and by the share of experts' messages that
    overlaps, and the gain of layouts made with pairs over layouts made without."""
    ahead = sorted(results, key=lambda result: max(_gains(result), default=0.0), reverse=True)
    parts = [table(_COLUMNS, map(_row, ahead)), table(_OF_LAYOUTS, _of_layouts(ahead))]
    mended = [f"- {r.candidate.name}: {r.candidate.mended}" for r in results if r.candidate.mended]
    if mended:
        parts.append("\n".join(["Megatron refuses these as they stand; compared:\n", *mended]))
    return "\n".join(parts)


def _row(result: Result) -> Sequence[object]:
    configuration = result.candidate.configuration
    return (
        result.candidate.name,
        configuration.ranks,
        configuration.microbatches,
        _steps(found.stock for found in result.found),
        _steps([result.stock_without]),
        _steps(found.ours for found in result.found),
        _steps([result.ours_without]),
        ", ".join(f"{gain:.2f}" for gain in _gains(result)),
    )


def _steps(steps: Iterable[Step | None]) -> str:
    """Return the seconds of ``steps``, and their schedules without repetition."""
    made = list(steps)
    seconds = [_NONE_FITS if step is None else f"{step.seconds:.3g}" for step in made]
    names = [step.schedule for step in made if step]
    return f"{', '.join(seconds)} {' / '.join(dict.fromkeys(names))}"


def _gains(result: Result) -> list[float]:
    """Return, by share, the seconds of Megatron's best step over those of ours. Ours has pairs,
    Megatron's may have none."""
    gains = []
    for found in result.found:
        stock = [step.seconds for step in (found.stock, result.stock_without) if step]
        if found.ours is not None and stock:
            gains.append(min(stock) / found.ours.seconds)
    return gains


def _of_layouts(results: Iterable[Result]) -> Iterator[Sequence[object]]:
    """Yield by how much the layout made without pairs is slower with pairs, and by how much the
    other is slower without."""
    sides: tuple[Callable[[Found], Crossed | None], ...] = (
        lambda found: found.stock_crossed,
        lambda found: found.ours_crossed,
    )
    for result in results:
        for side in sides:
            made = [crossed for crossed in map(side, result.found) if crossed]
            knowing = [c.in_pairs[1] / c.in_pairs[0] - 1 for c in made]
            serial = [c.alone[0] / c.alone[1] - 1 for c in made]
            yield (
                result.candidate.name,
                " / ".join(dict.fromkeys(c.schedule for c in made)),
                ", ".join(f"{gain:+.1%}" for gain in knowing),
                ", ".join(f"{gain:+.1%}" for gain in serial),
            )
