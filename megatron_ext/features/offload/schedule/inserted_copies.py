"""Offload: activations are in host memory while they are not needed (PipeOffload, Wan et al. 2025,
arXiv:2503.01328, sections 3 and 4).

The tensors that a forward pass stores for its backward pass can be copied to the host, their memory
freed, and copied back in time; so can the tensors that I stores for W. The copies run parallel to
the passes, on separate lanes; ranks that share a link to the host take turns on it. Which copies
there are, and when, is found by simulating the schedule without them (`offload`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ext.compile.program.memory import limited_amount, peak
from megatron_ext.compile.program.simulate import simulate_messages
from megatron_ext.schedule.action import Action, Kind, Slice, whole_of
from megatron_ext.schedule.costs import HostCosts
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.limit import fits
from megatron_ext.schedule.problem import Offload, Problem
from megatron_ext.schedule.schedule import Schedule, is_compute
from megatron_ext.schedule.timeline import Event

# Offload counts as free if the makespan is at most this multiple of the makespan without offload.
NEARLY_NOTHING = 1.01
_GOLDEN = (math.sqrt(5) - 1) / 2
# Factors by which trials slow the passes, so that copies over a slow link start early enough.
_SLOWER = [1.15**n for n in range(16)]


@dataclass(frozen=True)
class Absence:
    """Candidate for offload: memory that one pass of a microbatch allocates and a later one uses.

    Attributes:
        kinds: kinds of the copy to the host, of the wait for it, and of the copy back.
        made, used: the positions of the two passes among the passes of ``rank``.
        start, end: the end of the first pass, and the start of the second, in seconds.
        out_seconds, back_seconds: seconds of the copy to the host and of the copy back.
    """

    rank: int
    stage: int
    microbatch: int
    kinds: tuple[Kind, Kind, Kind]
    made: int
    used: int
    start: float
    end: float
    out_seconds: float
    back_seconds: float

    @property
    def spare(self) -> float:
        """Seconds for which memory on the device would be free with this offload alone."""
        return self.end - self.start - self.out_seconds - self.back_seconds


@dataclass(frozen=True)
class Booked:
    """Start times, in seconds, of the copy to the host and the copy back for one candidate."""

    absence: Absence
    out_start: float
    back_start: float

    @property
    def out_end(self) -> float:
        return self.out_start + self.absence.out_seconds


def offload(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule``, which has its messages and waits, with copies to the host and back.

    The copies are scheduled within the times at which the passes would run: to the host as soon as
    the link is free, and back as late as possible. Between passes, memory is freed as soon as a
    copy to the host has ended, and reallocated as late as the copy back can start. Copies of the
    longest-lived tensors are scheduled first. A tensor that would have to be copied back before its
    copy to the host has ended stays on the device: the slower the link, the fewer are offloaded,
    and no pass waits for a copy.

    To meet a memory limit for which the link is too slow, copies are booked as if passes took
    longer. Passes do take longer then, because they wait for copies.
    """
    if problem.options.activation_offload is not Offload.FIT:
        return _most_that_cost_nothing(schedule, problem)
    for slower in _SLOWER:
        leaving = _Leaving(schedule, problem, slower)
        fitting = leaving.of_each_link(leaving.fewest_that_fit)
        if leaving.fits(fitting.rows):
            break
    return fitting  # the schedule may exceed the limit; then `prove` says how much memory it needs


def _most_that_cost_nothing(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule`` with the most copies to the host that hardly lengthen the step.

    If each rank has its own link to the host, these are all copies for which the link has time. If
    ranks share links, one rank's copies can delay another's, so fewer copies are tried, in steps of
    an eighth.
    """
    leaving = _Leaving(schedule, problem, 1.0)
    host = problem.costs.host
    assert host is not None
    if not host.is_shared:
        return leaving.of_each_link(len)
    allowed = simulate_messages(schedule, problem).makespan * NEARLY_NOTHING
    for eighths in range(8, 0, -1):

        def count(absences: Sequence[Absence], eighths: int = eighths) -> int:
            return len(absences) * eighths // 8

        offloaded = leaving.of_each_link(count)
        if simulate_messages(offloaded, problem).makespan <= allowed:
            return offloaded
    return schedule


class _Leaving:
    """Maker of schedules in which some activations are offloaded to the host.

    Copies are booked as if passes took ``slower`` times as long.
    """

    def __init__(self, schedule: Schedule, problem: Problem, slower: float) -> None:
        host = problem.costs.host
        assert host is not None
        seconds = {d: tuple(slower * f for f in row) for d, row in problem.costs.seconds.items()}
        slow = replace(problem, costs=problem.costs.with_passes(seconds=seconds))
        self.schedule, self.problem, self.host = schedule, problem, host
        self.passes = simulate_messages(schedule, slow).compute

    def of_each_link(self, count: Callable[[Sequence[Absence]], int]) -> Schedule:
        """Return the schedule that offloads the longest-lived candidates.

        ``count`` tells how many candidates are offloaded by each group of ranks that share a link
        to the host.
        """
        rows = []
        ranks = range(self.problem.ranks)
        for sharing in itertools.batched(ranks, self.host.ranks_per_link):
            absences = self.absences(sharing)
            rows += self.rows(absences[: count(absences)], sharing)
        return replace(self.schedule, rows=tuple(rows))

    def absences(self, ranks: Sequence[int]) -> list[Absence]:
        """Return the candidates for offload of ``ranks``, each rank's longest-lived first.

        The list takes one candidate of each rank in turn.
        """
        of_ranks = []
        for rank in ranks:
            absences = _longest_lived_first(_absences(rank, self.passes[rank], self.problem))
            halves = self.problem.options.activation_offload is Offload.HALF
            of_ranks.append(_longer_lived_half(absences, self.problem) if halves else absences)
        turns = itertools.chain.from_iterable(itertools.zip_longest(*of_ranks))
        return [absence for absence in turns if absence is not None]

    def rows(self, absences: Sequence[Absence], ranks: Sequence[int]) -> list[tuple[Action, ...]]:
        """Return the rows of ``ranks`` with copies for the candidates ``absences``.

        Only candidates are copied for which the ranks' link to the host has time.
        """
        copies: dict[int, list[Booked]] = defaultdict(list)
        for booked in _book_copies(absences, self.host):
            copies[booked.absence.rank].append(booked)
        return [_insert(self.schedule.rows[r], self.passes[r], copies[r]) for r in ranks]

    def fewest_that_fit(self, absences: Sequence[Absence]) -> int:
        """Return the smallest number of offloaded candidates that meets the memory limit.

        If no number does, the number of all candidates is returned.
        """
        ranks = sorted({absence.rank for absence in absences})
        return bisect_left(
            range(len(absences)), True, key=lambda n: self.fits(self.rows(absences[:n], ranks))
        )

    def fits(self, rows: Sequence[tuple[Action, ...]]) -> bool:
        limit = self.problem.memory_limit
        assert limit is not None
        amount, allowed = limited_amount(limit, self.schedule, self.problem.costs)
        return all(fits(peak(row, amount), allowed) for row in rows)


# Entries for each kind of memory that can be offloaded: its copies and the wait for them, the pass
# that allocates the memory, and the passes that use it.
_LEAVES = (
    (
        (Kind.OFFLOAD_F, Kind.FREE_F, Kind.RELOAD_F),
        Kind.FORWARD,
        (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD),
    ),
    (
        (Kind.OFFLOAD_I, Kind.FREE_I, Kind.RELOAD_I),
        Kind.BACKWARD_INPUT,
        (Kind.BACKWARD_WEIGHT,),
    ),
)


def _absences(rank: int, row: Sequence[Event], problem: Problem) -> Iterator[Absence]:
    """Yield the candidates for offload on ``rank`` whose memory can be free while a pass runs."""
    made_at = {event.action: position for position, event in enumerate(row)}
    starts, ends = [event.start for event in row], [event.end for event in row]
    for used, event in enumerate(row):
        stage, kind, microbatch = event.action
        for kinds, maker, users in _LEAVES:
            if kind not in users:
                continue
            made = made_at[Action(stage, maker, microbatch)]
            copies = [Action(stage, kinds[n], microbatch) for n in (0, 2)]
            out, back = map(problem.costs.of, copies)
            absence = Absence(
                rank, stage, microbatch, kinds, made, used, ends[made], event.start, out, back
            )
            booked = Booked(absence, absence.start, absence.end - back)
            if _helps(_positions(booked, starts, ends)):
                yield absence


def _longest_lived_first(absences: Iterable[Absence]) -> list[Absence]:
    """Return the candidates for offload in the order in which their copies are booked.

    First come the stages whose activations can be on the host the longest, and the first slices of
    sequences. Within these, the first n microbatches are for any n evenly spread over the step.
    """
    groups: dict[tuple[int, Kind, int], list[Absence]] = defaultdict(list)
    for absence in absences:
        part = absence.microbatch
        number = part.slice if isinstance(part, Slice) else 0
        groups[absence.stage, absence.kinds[0], number].append(absence)
    by_spare = sorted(groups.values(), key=lambda group: -sum(a.spare for a in group) / len(group))
    return [
        absence
        for group in by_spare
        for absence in sorted(group, key=lambda a: whole_of(a.microbatch) * _GOLDEN % 1)
    ]


def _longer_lived_half(absences: list[Absence], problem: Problem) -> list[Absence]:
    """Return the candidates for offload of the longer-lived half of the chunks.

    With one chunk, return those of the first half of the slices, or of every other microbatch.
    (Tensors that wait for W are small, and may be offloaded from all chunks.)
    """
    chunks, slices = problem.placement.chunks, problem.slices.count
    if chunks == 1 and slices > 1:
        return [absence for absence in absences if absence.microbatch % slices < slices / 2]
    if chunks == 1:
        return [absence for absence in absences if whole_of(absence.microbatch) % 2 == 0]
    activations = [a for a in absences if a.kinds[0] is Kind.OFFLOAD_F]
    stages = list(dict.fromkeys(a.stage for a in activations))[: -(-chunks // 2)]
    return [a for a in absences if a.stage in stages or a not in activations]


def _book_copies(absences: Iterable[Absence], host: HostCosts) -> Iterator[Booked]:
    """Yield the times of copies for the candidates ``absences``, in the order of the candidates.

    Copies to the host start as early as possible, copies back as late as possible. A candidate
    whose copy back would start before its copy to the host has ended is skipped.
    """
    links: Mapping[object, _Link] = defaultdict(_Link)
    for absence in absences:
        out = links[host.link(absence.rank, Lane.TO_HOST)]
        back = links[host.link(absence.rank, Lane.FROM_HOST)]
        booked = Booked(
            absence,
            out.free_after(absence.start, absence.out_seconds),
            back.free_before(absence.end, absence.back_seconds),
        )
        if booked.out_end < booked.back_start:
            out.take(booked.out_start, absence.out_seconds)
            back.take(booked.back_start, absence.back_seconds)
            yield booked


class _Link:
    """Intervals in which one direction of a link to the host is busy; adjoining ones are merged."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def free_after(self, time: float, seconds: float) -> float:
        """Return the start of the first interval of ``seconds`` that is free from ``time`` on."""
        at = bisect_right(self._ends, time)  # first busy interval that ends after ``time``
        while at < len(self._starts) and self._starts[at] < time + seconds:
            time = self._ends[at]
            at += 1
        return time

    def free_before(self, time: float, seconds: float) -> float:
        """Return the start of the last free interval of ``seconds`` that ends by ``time``."""
        at = bisect_left(self._starts, time) - 1  # last busy interval that starts before ``time``
        while at >= 0 and self._ends[at] > time - seconds:
            time = self._starts[at]
            at -= 1
        return time - seconds

    def take(self, start: float, seconds: float) -> None:
        """Mark the interval of ``seconds`` from ``start`` on as busy on this link."""
        end, at = start + seconds, bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] == end:
            del self._starts[at]
            end = self._ends.pop(at)
        if at and self._ends[at - 1] == start:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)


def _positions(booked: Booked, starts: Sequence[float], ends: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of a candidate's copies in a rank's row.

    They are the numbers of the passes before which come the copy to the host, its wait, and the
    copy back.
    """
    absence = booked.absence
    soon = 1e-9 * ends[-1]
    first, last = absence.made + 1, absence.used
    out = min(max(bisect_right(ends, booked.out_start + soon), first), last)
    free = min(max(bisect_left(starts, booked.out_end - soon), out), last)
    back = min(max(bisect_right(ends, booked.back_start + soon), free), last)
    return out, free, back


def _helps(positions: Sequence[int]) -> bool:
    _, free, back = positions
    return free < back


def _insert(
    row: tuple[Action, ...], passes: Sequence[Event], copies: Iterable[Booked]
) -> tuple[Action, ...]:
    """Return a rank's ``row`` with the offload ``copies`` inserted.

    Copies are skipped if no pass runs between the wait for the copy to the host and the copy back.
    Copies start before the rank waits for sends. Copies before one pass are ordered by time, so
    that a copy back that has to start in a gap does not stand behind a wait that ends with the gap.
    """
    starts, ends = [event.start for event in passes], [event.end for event in passes]
    before: dict[int, list[tuple[float, int, Action]]] = defaultdict(list)
    for booked in copies:
        stage, microbatch = booked.absence.stage, booked.absence.microbatch
        positions = _positions(booked, starts, ends)
        if not _helps(positions):
            continue
        moments = booked.out_start, booked.out_end, booked.back_start
        for order, (position, moment) in enumerate(zip(positions, moments, strict=True)):
            action = Action(stage, booked.absence.kinds[order], microbatch)
            issued = max(moment, ends[position - 1])
            before[position].append((issued, order, action))
    new_row: list[Action] = []
    position = 0
    for action in row:
        if is_compute(action):
            at = len(new_row)
            while at and RULES[new_row[at - 1].kind].lane is Lane.WAIT:
                at -= 1
            new_row[at:at] = [copy for _, _, copy in sorted(before[position])]
            position += 1
        new_row.append(action)
    return tuple(new_row)
