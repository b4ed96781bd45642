"""The spec ``auto``, and the searches among which it chooses.

``auto`` allows any placement with any number of chunks, ``auto:placement=loop`` a loop of 2 to 6,
``auto:chunks=2`` a V or a loop of two. If only one search remains, as with ``auto:placement=v``,
the spec is another name for that search.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.base.words import counted, shown
from megatron_ext.compile.spec_options import parameters_of, parse_options, perhaps

AUTO = "auto"


@dataclass(frozen=True)
class PlacedSearch:
    """Search for schedules on one placement of stages, with ``chunks`` stages a rank."""

    placement: str
    chunks: int
    spec: str


SEARCHES = (
    PlacedSearch("line", 1, "zb-auto"),
    PlacedSearch("v", 2, "v-auto"),
    PlacedSearch("wave", 4, "wave-auto"),
    *(PlacedSearch("loop", chunks, f"loop-auto:vpp={chunks}") for chunks in range(2, 7)),
)
_PLACEMENTS = tuple(dict.fromkeys(search.placement for search in SEARCHES))


def auto_searches(spec: str) -> tuple[str, ...] | None:
    """Return the names of the searches that ``auto`` (with options) stands for; None if not
    ``auto``.

    If there are several searches, the best of their schedules is chosen later.

    Raises:
        ValueError: an option is not understood, or no search remains.
    """
    name, _, text = spec.partition(":")
    if name != AUTO:
        return None
    return _searches(**parse_options(AUTO, parameters_of(_searches), text))


def is_open(spec: str) -> bool:
    """Return whether ``spec`` is an ``auto`` that stands for more than one search.

    Raises:
        ValueError: an option of the ``auto`` is not understood, or no search remains.
    """
    return len(auto_searches(spec) or ()) > 1


def _searches(*, placement: str = "", chunks: int = 0) -> tuple[str, ...]:
    if placement and placement not in _PLACEMENTS:
        *others, last = _PLACEMENTS
        known = f"write {', '.join(others)} or {last}"
        raise ValueError(
            f"schedule {AUTO}: there is no placement of stages called {shown(placement)!r}; "
            f"{perhaps(placement, _PLACEMENTS, known)}"
        )
    placed = [search for search in SEARCHES if placement in ("", search.placement)]
    fitting = [search.spec for search in placed if chunks in (0, search.chunks)]
    if not fitting:
        there_are = sorted({search.chunks for search in placed})
        known = str(there_are[0])
        if len(there_are) > 1:
            known = f"{there_are[0]} to {there_are[-1]}"
        raise ValueError(
            f"schedule {AUTO} has no {placement or 'placement'} of {counted(chunks, 'chunk')} a "
            f"rank: write chunks={known}" + (" or another placement" if placement else "")
        )
    return tuple(fitting)
