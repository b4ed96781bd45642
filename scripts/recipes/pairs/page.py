"""Tables of public recipes with and without pairs of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from scripts.recipes.pairs.compared import Step
from scripts.recipes.pairs.recipes import Crossed, Found, Result
from scripts.recipes.tables import table

_NONE_FITS = "none fits"
_COLUMNS = ("recipe", "p", "m", "Megatron in pairs", "alone", "ours in pairs", "alone", "gain")
_OF_LAYOUTS = ("recipe", "schedule", "in pairs", "alone")


def page(results: Sequence[Result]) -> str:
    """Seconds of a step, by recipe and by how much of experts' messages hides; and what layouts
    that know of pairs gain over those that do not."""
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
    """Their seconds, and the schedules, each once if it is the same for all."""
    made = list(steps)
    seconds = [_NONE_FITS if step is None else f"{step.seconds:.3g}" for step in made]
    names = [step.schedule for step in made if step]
    return f"{', '.join(seconds)} {' / '.join(dict.fromkeys(names))}"


def _gains(result: Result) -> list[float]:
    """By share: how much more time Megatron's best step takes, as a multiple of ours. Ours is in
    pairs, Megatron's may be without."""
    gains = []
    for found in result.found:
        stock = [step.seconds for step in (found.stock, result.stock_without) if step]
        if found.ours is not None and stock:
            gains.append(min(stock) / found.ours.seconds)
    return gains


def _of_layouts(results: Iterable[Result]) -> Iterator[Sequence[object]]:
    """How much more time the layout takes that knows nothing of pairs, in pairs; and how much more
    the other takes alone."""
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
