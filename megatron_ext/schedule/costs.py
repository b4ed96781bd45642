"""What passes cost: seconds per stage, seconds per hop, bytes held.

A duty's cost is given, a kind's cost is the sum over the duties it covers (kinds.py): a fused
backward B costs I + W.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ext.schedule.action import Action
from megatron_ext.schedule.kinds import HOST_LANES, RULES, Duty, Held, Lane, Where
from megatron_ext.schedule.placement import Placement

_DUTY_OF = {"f": Duty.FORWARD, "i": Duty.INPUT_GRADIENT, "w": Duty.WEIGHT_GRADIENT}
_SINGLE = (Held.LOGITS.value, Held.MESSAGE.value)  # bytes that are one figure, of no stage

# What is given of host copies: the duties, those of activations and those of what W needs.
_COPIES = {
    "d2h": (Duty.OFFLOAD_ACTIVATION, Duty.OFFLOAD_WEIGHT_INPUTS),
    "h2d": (Duty.RELOAD_ACTIVATION, Duty.RELOAD_WEIGHT_INPUTS),
}
_LINK = ("link", "duplex")
FILE_VERSION = 1


@dataclass(frozen=True)
class VocabularyCosts:
    """What a microbatch takes in the embedding and the output layer, were one rank to have them.

    Attributes:
        head: seconds of the output layer and the loss, for F, I and W.
        embedding: seconds of the lookup, and of its weight's gradient.
        logits_bytes: bytes of all logits.
    """

    head: tuple[float, float, float] = (0.0, 0.0, 0.0)
    embedding: tuple[float, float] = (0.0, 0.0)
    logits_bytes: float = 0.0

    @property
    def of_ends(self) -> Mapping[Duty, tuple[float, float]]:
        """Seconds that the first and the last stage have more, per duty."""
        lookup, table_gradient = self.embedding
        forward, input_gradient, weight_gradient = self.head
        return {
            Duty.FORWARD: (lookup, forward),
            Duty.INPUT_GRADIENT: (0.0, input_gradient),
            Duty.WEIGHT_GRADIENT: (table_gradient, weight_gradient),
        }


@dataclass(frozen=True)
class HostCosts:
    """What copies between a rank's memory and the host's take.

    Attributes:
        seconds: of a microbatch, per duty one figure per stage.
        ranks_per_link: so many ranks in a row share a link to the host and take turns.
        duplex: whether a link carries both directions at once.
    """

    seconds: Mapping[Duty, tuple[float, ...]]
    ranks_per_link: int = 1
    duplex: bool = True

    @property
    def is_shared(self) -> bool:
        """Whether a copy may have to wait for another rank's, or for one in the other direction."""
        return self.ranks_per_link > 1 or not self.duplex

    def link(self, rank: int, lane: Lane) -> tuple[int, Lane | None]:
        """What copies of ``rank`` in the direction ``lane`` share with others."""
        return rank // self.ranks_per_link, lane if self.duplex else None


@dataclass(frozen=True)
class Costs:
    """Costs of one microbatch.

    Attributes:
        seconds: per duty, one figure per stage. (Any unit of time will do if all share it.)
        hop: seconds a message takes from one rank to another.
        held_bytes: per kind of memory, bytes per stage; None when bytes are not known.
        message_bytes: of what goes from stage to stage; 0 when that is not known.
        vocabulary: which part of the first and the last stage's figures is the embedding's and the
            output layer's; None when that is not known.
        host: what copies to the host and back take; None when that is not known.
        whole: of costs whose vocabulary is shared by the ranks, what they were before.
        origin: how these figures came about, for people to read.
    """

    seconds: Mapping[Duty, tuple[float, ...]]
    hop: float = 0.0
    held_bytes: Mapping[Held, tuple[float, ...]] | None = None
    origin: str = "given"
    vocabulary: VocabularyCosts | None = None
    host: HostCosts | None = None
    whole: Costs | None = None
    message_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not any(map(any, self.seconds.values())):
            raise ValueError("costs: all passes cost nothing; at least one must cost something")

    @property
    def stages(self) -> int:
        return len(self.seconds[Duty.FORWARD])

    def of(self, action: Action) -> float:
        """Seconds of ``action`` on its lane. A message takes its hop at the sender, and so does a
        collective. Those of the optimizer's validation are a few bytes, and take none: nor do the
        all-reduces in whose place they are."""
        rule = RULES[action.kind]
        if rule.where is Where.RANK:
            return 0.0
        if rule.lane is Lane.COMPUTE:
            return sum(self.seconds[duty][action.stage] for duty in rule.covers)
        if rule.lane in HOST_LANES:
            assert self.host is not None
            return self.host.seconds[rule.covers[0]][action.stage]
        return self.hop if rule.lane in (Lane.SEND, Lane.COLLECTIVE) else 0.0

    def per_rank(self, placement: Placement) -> Costs:
        """The same work with each rank's chunks in one stage, as on a line."""

        def joined(figures: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(sum(figures[stage] for stage in row) for row in placement.stages_of)

        held = self.held_bytes
        return Costs(
            {duty: joined(figures) for duty, figures in self.seconds.items()},
            self.hop,
            None if held is None else {kind: joined(figures) for kind, figures in held.items()},
            self.origin,
            message_bytes=self.message_bytes,
        )

    def with_host(
        self,
        to_host: Sequence[float],
        from_host: Sequence[float],
        ranks_per_link: int = 1,
        duplex: bool = True,
    ) -> Costs:
        """These costs and those of copying what a microbatch leaves on a stage for its backward
        pass, in seconds per stage. What it leaves for W alone takes as long for its bytes; where
        they are not known, as long as the whole."""
        share = [1.0] * self.stages
        if self.held_bytes is not None:
            whole, left = (self.held_bytes[h] for h in (Held.ACTIVATION, Held.WEIGHT_INPUTS))
            share = [b / a if a else 1.0 for a, b in zip(whole, left, strict=True)]
        seconds = {}
        for figures, duties in zip((to_host, from_host), _COPIES.values(), strict=True):
            seconds[duties[0]] = tuple(figures)
            seconds[duties[1]] = tuple(f * part for f, part in zip(figures, share, strict=True))
        return replace(self, host=HostCosts(seconds, ranks_per_link, duplex))

    def with_copies_of(self, other: Costs) -> Costs:
        """These costs with copies as quick as those of ``other``, of the bytes that these hold."""
        if other.host is None or self.held_bytes is None or other.held_bytes is None:
            return replace(self, host=other.host)
        pairs = zip(
            self.held_bytes[Held.ACTIVATION], other.held_bytes[Held.ACTIVATION], strict=True
        )
        shares = [here / there if there else 0.0 for here, there in pairs]
        out, back = (
            [share * each for share, each in zip(shares, other.host.seconds[of[0]], strict=True)]
            for of in _COPIES.values()
        )
        return self.with_host(out, back, other.host.ranks_per_link, other.host.duplex)

    def with_vocabulary(self, vocabulary: VocabularyCosts) -> Costs:
        """These costs, which are those of the layers, and ``vocabulary`` on the first and the last
        stage."""
        assert self.vocabulary is None
        return replace(self._at_the_ends(vocabulary, +1), vocabulary=vocabulary)

    def without_vocabulary(self) -> Costs:
        """The layers' costs alone. Where the vocabulary's are not known, they are still there."""
        if self.vocabulary is None:
            return self
        return replace(self._at_the_ends(self.vocabulary, -1), vocabulary=None)

    def _at_the_ends(self, vocabulary: VocabularyCosts, sign: int) -> Costs:
        def added(figures: tuple[float, ...], first: float, last: float) -> tuple[float, ...]:
            more = [0.0] * len(figures)
            more[0] += sign * first
            more[-1] += sign * last
            # What is taken away again may leave less than 0, by rounding.
            return tuple(max(a + b, 0.0) for a, b in zip(figures, more, strict=True))

        held = self.held_bytes
        if held is not None:
            logits = vocabulary.logits_bytes
            held = {kind: added(figures, 0.0, logits) for kind, figures in held.items()}
        ends = vocabulary.of_ends.items()
        seconds = {duty: added(self.seconds[duty], *end) for duty, end in ends}
        return replace(self, seconds=seconds, held_bytes=held)

    def __str__(self) -> str:
        if self.whole is not None:
            return str(self.whole)
        seconds = self.without_vocabulary().seconds
        parts = [f"{key}={_joined(seconds[duty])}" for key, duty in _DUTY_OF.items()]
        parts.append(f"comm={self.hop:.4g}")
        if self.vocabulary is not None:
            given = {"head": self.vocabulary.head, "embedding": self.vocabulary.embedding}
            parts += [f"{key}={_joined(figures)}" for key, figures in given.items() if any(figures)]
        if self.host is not None:
            copies = self.host.seconds
            parts += [f"{key}={_joined(copies[duties[0]])}" for key, duties in _COPIES.items()]
            if self.host.ranks_per_link > 1:
                parts.append(f"link={self.host.ranks_per_link}")
            if not self.host.duplex:
                parts.append("duplex=0")
        return ",".join(parts)


def _joined(figures: Sequence[float]) -> str:
    return "/".join(f"{figure:.4g}" for figure in figures)


def uniform(
    placement: Placement, f: float, i: float, w: float, comm: float = 0.0, origin: str = "given"
) -> Costs:
    """The same costs on every rank: ``f``, ``i``, ``w`` per microbatch of a full rank."""
    per_stage = {"f": f, "i": i, "w": w}
    seconds = {
        _DUTY_OF[key]: (value / placement.chunks,) * placement.stages
        for key, value in per_stage.items()
    }
    return Costs(seconds, comm, origin=origin)


def parse_costs(text: str, placement: Placement) -> Costs:
    """``f=10,i=12,w=8,comm=1`` (comm may be left out), or the path of a JSON file (`load_costs`).

    ``f=5/5/5/8`` gives one figure per stage. ``head=5/6/4`` are F, I and W of the whole output
    layer, ``embedding=1/1`` the whole embedding's lookup and weight gradient: what the last and the
    first stage take beside their layers. ``d2h=6,h2d=6`` are the copies of all that a microbatch
    of a full rank leaves for its backward pass to the host and back (one figure, or one per stage;
    h2d is d2h if left out), ``link=2`` is how many ranks in a row share a link to the host, and
    ``duplex=0`` that a link carries one direction at a time. What ``str`` of Costs prints is read
    back.

    Raises:
        ValueError: neither, a figure missing, negative or given twice.
    """
    if "=" not in text:
        return load_costs(Path(text), placement)
    figures: dict[str, list[float]] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        if key in figures:
            raise ValueError(f"costs {text!r}: {key!r} is given twice; {_EXAMPLE}")
        try:
            figures[key] = [float(figure) for figure in value.split("/")]
        except ValueError:
            raise ValueError(f"costs {text!r}: {part!r} is no figure; {_EXAMPLE}") from None
    unknown = figures.keys() - {*_DUTY_OF, "comm", *_PARTS, *_COPIES, *_LINK}
    missing = _DUTY_OF.keys() - figures.keys()
    if unknown or missing:
        what = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
        raise ValueError(f"costs {text!r}: {what}; {_EXAMPLE}")
    seconds = {duty: _per_stage(figures[key], placement, text) for key, duty in _DUTY_OF.items()}
    hops = figures.get("comm", [0.0])
    if len(hops) > 1:
        raise ValueError(f"costs {text!r}: comm is one figure; {_EXAMPLE}")
    _check_figures(text, hops)
    costs = _with_vocabulary(Costs(seconds, hops[0]), figures, 0.0, text)
    return _with_host(costs, figures, placement, text)


# What is given of the vocabulary: of which passes.
_PARTS = {"head": "F, I and W", "embedding": "the lookup and the weight gradient"}


def _with_vocabulary(
    costs: Costs, figures: Mapping[str, Any], logits_bytes: float, what: str
) -> Costs:
    """``costs``, and what ``figures`` have under the keys of `_PARTS`, if anything."""
    parts: dict[str, Any] = {}
    for key, passes in _PARTS.items():
        if key not in figures:
            continue
        wanted = len(getattr(VocabularyCosts, key))
        part = figures[key] if isinstance(figures[key], list) else [figures[key]]
        if len(part) != wanted:
            raise ValueError(
                f"costs {what}: {key} is {wanted} figures, of {passes} (one microbatch through the "
                f"whole of it), not {len(part)}"
            )
        _check_figures(f"{what}, {key}", part)
        parts[key] = tuple(map(float, part))
    if not parts and not logits_bytes:
        return costs
    return costs.with_vocabulary(VocabularyCosts(**parts, logits_bytes=logits_bytes))


def _with_host(costs: Costs, given: Mapping[str, Any], placement: Placement, what: str) -> Costs:
    """``costs``, and what ``given`` has under the keys of `_COPIES` and `_LINK`, if anything."""
    figures = {
        key: given[key] if isinstance(given[key], list) else [given[key]]
        for key in (*_COPIES, *_LINK)
        if key in given
    }
    if not figures:
        return costs
    if "d2h" not in figures:
        raise ValueError(
            f"costs {what}: {min(figures)} without d2h; add d2h=, the copy to the host"
        )
    for key, allowed in (("link", "1 or more ranks"), ("duplex", "0 or 1")):
        value = figures.get(key, [1])
        if value not in ([0], [1]) if key == "duplex" else not _is_count(value):
            raise ValueError(f"costs {what}: {key} is {allowed}, not {value}")
    per_stage = {
        key: _per_stage(figures.get(key, figures["d2h"]), placement, f"{what}, {key}")
        for key in _COPIES
    }
    link, duplex = figures.get("link", [1])[0], figures.get("duplex", [1])[0]
    return costs.with_host(per_stage["d2h"], per_stage["h2d"], int(link), bool(duplex))


def _is_count(value: list[Any]) -> bool:
    return len(value) == 1 and value[0] == int(value[0]) >= 1


_EXAMPLE = "write f=10,i=12,w=8,comm=1 (one microbatch of a full rank; comm per hop) or a file"


def load_costs(path: Path, placement: Placement) -> Costs:
    """Read a costs file: JSON with ``version``, ``f``, ``i``, ``w``, ``comm`` and ``bytes``.

    ``f``, ``i`` and ``w`` are one figure per microbatch of a full rank, or a list of one figure per
    stage. ``bytes``, if there, maps ``activation`` and ``weight inputs`` likewise. ``head`` and
    ``embedding`` are lists as in `parse_costs`, and ``bytes`` may have ``logits``, one figure: what
    the last stage holds beside its layers, and ``message``: what goes from stage to stage.
    ``d2h``, ``h2d``, ``link`` and ``duplex`` are those of `parse_costs`, and ``origin`` is a text
    for people.

    Raises:
        ValueError: no such file, not JSON, another version, lists of another length, or keys that
            are missing or unknown.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"costs file {path} cannot be read: {error}; {_EXAMPLE}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"costs file {path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("version") != FILE_VERSION:
        raise ValueError(f'costs file {path}: "version": {FILE_VERSION} is expected at the top')
    missing = _DUTY_OF.keys() - data.keys()
    if missing:
        raise ValueError(f"costs file {path} lacks {sorted(missing)}; {_EXAMPLE}")
    known = ["version", "origin", *_DUTY_OF, "comm", "bytes", *_PARTS, *_COPIES, *_LINK]
    unknown = data.keys() - set(known)
    if unknown:
        raise ValueError(
            f"costs file {path} has unknown {sorted(unknown)}; known are {', '.join(known)}"
        )

    def per_stage(value: Any, what: str) -> tuple[float, ...]:
        figures = value if isinstance(value, list) else [value]
        return _per_stage(figures, placement, f"{path}, {what}")

    held, single = None, dict.fromkeys(_SINGLE, 0.0)
    if "bytes" in data:
        figures = data["bytes"]
        kinds = (Held.ACTIVATION, Held.WEIGHT_INPUTS)
        names = [kind.value for kind in kinds]
        if not isinstance(figures, dict) or figures.keys() - set(_SINGLE) != set(names):
            raise ValueError(
                f"costs file {path}: bytes must give {' and '.join(names)}, and may give "
                f"{' and '.join(_SINGLE)}"
            )
        for name in _SINGLE:
            single[name] = figures.get(name, 0.0)
            _check_figures(f"{path}, {name}", [single[name]])
        held = {kind: per_stage(figures[kind.value], kind.value) for kind in kinds}
    seconds = {duty: per_stage(data[key], key) for key, duty in _DUTY_OF.items()}
    hop = data.get("comm", 0)
    _check_figures(f"{path}, comm", [hop])
    origin = f"{path} ({data['origin']})" if "origin" in data else str(path)
    message_bytes = float(single[Held.MESSAGE.value])
    costs = Costs(seconds, float(hop), held, origin, message_bytes=message_bytes)
    costs = _with_vocabulary(costs, data, float(single[Held.LOGITS.value]), str(path))
    return _with_host(costs, data, placement, str(path))


def save_costs(costs: Costs, path: Path) -> None:
    """Write ``costs`` so that `load_costs` reads them. Raises OSError."""
    assert costs.whole is None
    layers, vocabulary = costs.without_vocabulary(), costs.vocabulary or VocabularyCosts()
    data: dict[str, Any] = {"version": FILE_VERSION, "origin": costs.origin}
    data |= {key: _rounded(layers.seconds[duty]) for key, duty in _DUTY_OF.items()}
    data["comm"] = _rounded([costs.hop])[0]
    for key in _PARTS:
        if any(figures := getattr(vocabulary, key)):
            data[key] = _rounded(figures)
    if costs.host is not None:
        data |= {key: _rounded(costs.host.seconds[duties[0]]) for key, duties in _COPIES.items()}
        data |= {"link": costs.host.ranks_per_link, "duplex": int(costs.host.duplex)}
    if layers.held_bytes is not None:
        data["bytes"] = {held.value: _whole(each) for held, each in layers.held_bytes.items()}
        data["bytes"][Held.LOGITS.value] = round(vocabulary.logits_bytes)
        data["bytes"][Held.MESSAGE.value] = round(costs.message_bytes)
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _rounded(figures: Sequence[float]) -> list[float]:
    return [float(f"{figure:.6g}") for figure in figures]


def _whole(figures: Sequence[float]) -> list[int]:
    return [round(figure) for figure in figures]


def _per_stage(figures: Sequence[Any], placement: Placement, what: str) -> tuple[float, ...]:
    """One figure per stage; a single one is a full rank's, of which a chunk costs 1/v."""
    _check_figures(what, figures)
    if len(figures) == 1:
        return (float(figures[0]) / placement.chunks,) * placement.stages
    if len(figures) != placement.stages:
        raise ValueError(
            f"costs {what}: {len(figures)} figures for {placement.stages} stages; give one figure "
            f"per microbatch of a full rank, or one per stage"
        )
    return tuple(float(figure) for figure in figures)


def _check_figures(what: str, figures: Sequence[Any]) -> None:
    for figure in figures:
        is_number = isinstance(figure, int | float) and not isinstance(figure, bool)
        if not is_number or not 0 <= figure < 1e18:
            raise ValueError(f"costs {what}: {figure!r} is no cost; costs are finite and >= 0")
