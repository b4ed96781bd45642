"""Memory account of a schedule, rank by rank.

The same schedule is measured in two units: in microbatches, as the papers count, and in bytes, as
GPUs do. Both come from one table, the changes that each kind of action makes (`kinds`), added up
along a rank's row. Limits, peaks and curves all read that sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

from megatron_ext.base.words import counted
from megatron_ext.schedule.action import Action, Kind, Slice, token_share
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Held, Lane, Source
from megatron_ext.schedule.limit import MemoryLimit, fits
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Offload, Problem, Recompute
from megatron_ext.schedule.schedule import Schedule, is_compute

# Function that returns the memory of one kind (such as activations) on one stage.
Amount = Callable[[Held, int], float]

INPUT_SHARE = 0.1  # assumed share of a stage's input in its activation, if bytes are not known

# Kind of pass that each kind of recompute pass repeats.
_RECOMPUTES = {kind: rule.repeats for kind, rule in RULES.items() if rule.repeats is not None}
_MADE = frozenset(_RECOMPUTES.values())

# Kind of message that each kind of pass uses as its input.
_USES = {
    kind: need.kinds[0]
    for kind, rule in RULES.items()
    for need in rule.needs
    if need.source is Source.REMOTE
}


def memory_curve(row: tuple[Action, ...], amount: Amount) -> list[float]:
    """Return the memory held during each compute action in a rank's ``row``, in ``amount``'s unit.

    An action allocates its memory at its start and frees at its end. An action that does both
    counts only its end: I turns activations into the inputs of W layer by layer.
    """
    held = zip(row, held_during(row, amount), strict=True)
    return [amount for action, amount in held if is_compute(action)]


def held_during(row: tuple[Action, ...], amount: Amount) -> Iterator[float]:
    """Yield the memory held during every action in a rank's ``row``, in the unit of ``amount``.

    Messages and copies from the host take memory too. A received tensor counts until the pass that
    uses it begins: the part that F keeps of it belongs to the activation, and a gradient is freed
    while the pass computes the next one. A pass keeps only memory that some pass of its stage
    frees: in an evaluation F keeps nothing. A pass that is recomputed keeps its stage's input, and
    the recomputation allocates the rest. A slice takes its share of its microbatch's memory. The
    gradients of keys and values, to which slices add, are held for the whole microbatch, from its
    first backward pass to its last.
    """

    first = row[0].microbatch if row else 0
    ends = first.ends if isinstance(first, Slice) else ()
    shares = [end - begin for begin, end in pairwise((0.0, *ends))]
    changes = _changes(row, amount, are_cut=bool(ends))
    recomputed: set[tuple[int, Kind, int]] = set()
    if any(kind in _RECOMPUTES for _, kind in changes):
        made = (action for action in row if action.kind in _RECOMPUTES)
        recomputed = {(stage, _RECOMPUTES[kind], k) for stage, kind, k in made}

    held = 0.0
    received: set[tuple[int, Kind, int]] = set()  # messages that were received and are not used yet
    for stage, kind, microbatch in row:
        gained, lost, message, receives, gathered = changes[stage, kind]
        tokens, taken, given_back = 1.0, 0.0, 0.0
        if ends and isinstance(microbatch, Slice):
            tokens = shares[microbatch.slice]
            if gathered:
                taken, given_back = gathered * microbatch.is_last, gathered * microbatch.is_first
        if receives:
            received.add((stage, kind, microbatch))
        elif message is not None and (used_now := (stage, message, microbatch)) in received:
            received.remove(used_now)
            held -= amount(Held.MESSAGE, stage) * tokens
        if recomputed and (stage, kind, microbatch) in recomputed:
            gained = kept_for_recompute(stage, microbatch, amount)
        elif recomputed and kind in _RECOMPUTES:
            gained -= kept_for_recompute(stage, microbatch, amount)
        held += taken
        yield held + (gained * tokens if not lost else 0.0)
        held += (gained - lost) * tokens - given_back


# Changes of an action: the memory that it allocates and that it frees, the kind of message that it
# uses, whether it receives a message, and what the microbatch's first or last slice allocates or
# frees in addition (`Rule.gathers`).
_Change = tuple[float, float, Kind | None, bool, float]


def _changes(
    row: tuple[Action, ...], amount: Amount, *, are_cut: bool
) -> dict[tuple[int, Kind], _Change]:
    """Return how an action of each stage and kind in a rank's ``row`` changes the memory held."""
    on_stages = {(stage, kind) for stage, kind, _ in row}
    used = {(stage, held) for stage, kind in on_stages for held in RULES[kind].releases}
    changes = {}
    for stage, kind in on_stages:
        rule = RULES[kind]
        gained = sum(
            amount(held, stage)
            for held in rule.acquires
            if held is Held.MESSAGE or (stage, held) in used
        )
        lost = sum(amount(held, stage) for held in rule.releases)
        # A copy of a sliced microbatch to the host or back leaves keys and values on the device.
        if are_cut and rule.all_or_none is Held.ACTIVATION:
            stays = amount(Held.KEYS_VALUES, stage)
            gained, lost = (max(a - stays, 0.0) if a else a for a in (gained, lost))
        receives = rule.lane is Lane.RECEIVE and bool(rule.acquires)
        gathered = sum(amount(held, stage) for held in rule.gathers) if are_cut else 0.0
        changes[stage, kind] = gained, lost, _USES.get(kind), receives, gathered
    return changes


def kept_for_recompute(stage: int, microbatch: int, amount: Amount) -> float:
    """Return the memory stored per microbatch for an activation that is recomputed later.

    This is the stage's input, and for a slice its keys and values, to which later slices attend in
    the meantime.
    """
    is_slice = isinstance(microbatch, Slice)
    return amount(Held.INPUT, stage) + (amount(Held.KEYS_VALUES, stage) if is_slice else 0.0)


def in_microbatches(schedule: Schedule) -> Amount:
    """Return the function that counts memory in microbatches, as the zero-bubble papers do.

    With v chunks a rank, an activation counts 1/v from F to W (or B), and the input gradient frees
    nothing. Logits do not count, as they belong to no layer; nor do messages, nor keys and values
    on top of the activations. A stage's input counts a tenth of its activation.
    """
    share = 1 / schedule.placement.chunks
    none = dict.fromkeys((Held.LOGITS, Held.MESSAGE, Held.KEYS_VALUES), 0.0)
    figures = {**none, Held.INPUT: INPUT_SHARE * share}
    return lambda held, stage: figures.get(held, share)


def in_bytes(costs: Costs) -> Amount:
    """Return the function that counts memory in bytes, by the bytes in ``costs``."""
    held_bytes, links = costs.held_bytes, costs.links
    assert held_bytes is not None

    def message(behind: int) -> float:
        return links.states_behind(behind) * links.message_bytes

    def amount(held: Held, stage: int) -> float:
        if held is Held.MESSAGE:  # the larger of the messages to the previous and to the next stage
            return max(message(stage - 1), message(stage))
        if held is Held.KEYS_VALUES:
            return costs.slices.keys_values[stage] if costs.slices.keys_values else 0.0
        if held is Held.INPUT:
            return _input_bytes(stage, held_bytes[Held.ACTIVATION][stage], message(stage - 1))
        return held_bytes[held][stage]

    return amount


def _input_bytes(stage: int, activation: float, message: float) -> float:
    """Return the bytes of the input of ``stage``, which are those of a message.

    They are 0 for the first stage, whose input is tokens. If the bytes of messages are not known,
    they are taken as a share of the activation.
    """
    return min(message if stage else 0.0, activation) if message else INPUT_SHARE * activation


def bytes_for(limit: MemoryLimit, costs: Costs) -> Mapping[Held, tuple[float, ...]]:
    """Return the bytes in ``costs``, which a memory limit in bytes requires.

    Raises:
        ValueError: the costs have no bytes.
    """
    if costs.held_bytes is None:
        raise ValueError(
            f"the memory limit is {limit}, but the costs ({costs.origin}) have no "
            f"bytes: give the limit in microbatches (5 or 0.5x), or a costs file with bytes"
        )
    return costs.held_bytes


def limited_amount(limit: MemoryLimit, schedule: Schedule, costs: Costs) -> tuple[Amount, float]:
    """Return the function that counts memory in the unit of ``limit``, and the amount allowed.

    Raises:
        ValueError: as `bytes_for`.
    """
    if limit.microbatches is not None:
        return in_microbatches(schedule), limit.microbatches
    bytes_for(limit, costs)
    assert limit.bytes is not None
    return in_bytes(costs), float(limit.bytes)


def without_reserved(limit: MemoryLimit, microbatches: int, problem: Problem) -> MemoryLimit:
    """Return the memory ``limit`` less the memory that vocabulary parallelism takes in addition.

    That is the activations of ``microbatches`` further microbatches on a rank, and logits.

    Raises:
        ValueError: less than one microbatch is left.
    """
    if limit.microbatches is not None:
        microbatch = 1.0
        more, allowed = float(microbatches), limit.microbatches
    else:
        assert limit.bytes is not None
        held = bytes_for(limit, problem.costs)
        ranks = problem.placement.stages_of
        microbatch = max(sum(held[Held.ACTIVATION][stage] for stage in row) for row in ranks)
        # One more microbatch's logits are counted, as logits stay in memory until their pass SI has
        # ended.
        logits = max(held[Held.LOGITS])
        more, allowed = microbatches * microbatch + (microbatches + 1) * logits, float(limit.bytes)
    left = allowed - more
    if left < microbatch:
        raise ValueError(
            f"the memory limit is {limit}, but the schedule holds at least 1 microbatch, and "
            f"vocabulary parallelism {problem.options.vocab_parallel} adds "
            f"{counted(microbatches, 'microbatch')}; give at least "
            f"{limit.at_least(microbatch + more)}"
        )
    if limit.microbatches is not None:
        return MemoryLimit(microbatches=left)
    return MemoryLimit(bytes=int(left))


def check_one_microbatch(problem: Problem) -> None:
    """Raise ValueError if the memory limit is below one microbatch's activations on some rank.

    Every schedule holds that much there, unless it copies activations to the host or recomputes
    them.
    """
    limit, options = problem.memory_limit, problem.options
    saves = options.activation_offload is not Offload.NONE or options.recompute != Recompute()
    if limit is None or saves or problem.slices.count > 1:
        return
    least = 1.0
    if limit.bytes is not None:
        held = bytes_for(limit, problem.costs)[Held.ACTIVATION]
        least = max(sum(held[stage] for stage in row) for row in problem.placement.stages_of)
    if not fits(least, limit.amount):
        raise ValueError(
            f"the memory limit is {limit}, and every rank holds at least one microbatch: give at "
            f"least {limit.at_least(least)}"
        )


def peaks(schedule: Schedule, amount: Amount) -> list[float]:
    """Return the largest amount of memory that each rank of ``schedule`` holds."""
    return [peak(row, amount) for row in schedule.rows]


def peak(row: tuple[Action, ...], amount: Amount) -> float:
    """Return the largest amount of memory that a rank holds during an action of its ``row``."""
    return max(held_during(row, amount), default=0.0)


def recomputed_share(schedule: Schedule) -> float:
    """Return the share of the schedule's forward passes whose activations are recomputed."""
    kinds = [action.kind for row in schedule.rows for action in row]
    return sum(map(_RECOMPUTES.__contains__, kinds)) / sum(map(_MADE.__contains__, kinds))


def peak_on_host(row: tuple[Action, ...], placement: Placement) -> float:
    """Return how many microbatches of a rank's activations are on the host at most at one time."""
    now = most = 0.0
    for action in row:
        rule = RULES[action.kind]
        copied = len(rule.moves) * token_share(action.microbatch)
        now += copied if rule.lane is Lane.TO_HOST else -copied
        most = max(most, now)
    return most / placement.chunks


def most_on_host(row: tuple[Action, ...]) -> dict[tuple[int, Held], int]:
    """Return the largest number of microbatches, or slices, on the host, by stage and kind of
    memory.

    Each counts from the start of its copy to the host until the start of its copy back.
    """
    most: Counter[tuple[int, Held]] = Counter()
    now: Counter[tuple[int, Held]] = Counter()
    for action in row:
        rule = RULES[action.kind]
        for held in rule.moves:
            now[action.stage, held] += 1 if rule.lane is Lane.TO_HOST else -1
            most |= now
    return dict(most)
