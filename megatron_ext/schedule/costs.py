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
from megatron_ext.schedule.kinds import RULES, Duty, Held, Lane
from megatron_ext.schedule.placement import Placement

_DUTY_OF = {"f": Duty.FORWARD, "i": Duty.INPUT_GRADIENT, "w": Duty.WEIGHT_GRADIENT}
_LOGITS = Held.LOGITS.value
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
class Costs:
    """Costs of one microbatch.

    Attributes:
        seconds: per duty, one figure per stage. (Any unit of time will do if all share it.)
        hop: seconds a message takes from one rank to another.
        held_bytes: per kind of memory, bytes per stage; None when bytes are not known.
        vocabulary: which part of the first and the last stage's figures is the embedding's and the
            output layer's; None when that is not known.
        whole: of costs whose vocabulary is shared by the ranks, what they were before.
        origin: how these figures came about, for people to read.
    """

    seconds: Mapping[Duty, tuple[float, ...]]
    hop: float = 0.0
    held_bytes: Mapping[Held, tuple[float, ...]] | None = None
    origin: str = "given"
    vocabulary: VocabularyCosts | None = None
    whole: Costs | None = None

    def __post_init__(self) -> None:
        if not any(map(any, self.seconds.values())):
            raise ValueError("costs: all passes cost nothing; at least one must cost something")

    @property
    def stages(self) -> int:
        return len(self.seconds[Duty.FORWARD])

    def of(self, action: Action) -> float:
        """Seconds of ``action`` on its lane. A message takes its hop at the sender, and so does a
        collective."""
        rule = RULES[action.kind]
        if rule.lane is Lane.COMPUTE:
            return sum(self.seconds[duty][action.stage] for duty in rule.covers)
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
        )

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
    first stage take beside their layers. What ``str`` of Costs prints is read back.

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
    unknown = figures.keys() - {*_DUTY_OF, "comm", *_PARTS}
    missing = _DUTY_OF.keys() - figures.keys()
    if unknown or missing:
        what = f"unknown {sorted(unknown)}" if unknown else f"missing {sorted(missing)}"
        raise ValueError(f"costs {text!r}: {what}; {_EXAMPLE}")
    seconds = {duty: _per_stage(figures[key], placement, text) for key, duty in _DUTY_OF.items()}
    hops = figures.get("comm", [0.0])
    if len(hops) > 1:
        raise ValueError(f"costs {text!r}: comm is one figure; {_EXAMPLE}")
    _check_figures(text, hops)
    return _with_vocabulary(Costs(seconds, hops[0]), figures, 0.0, text)


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


_EXAMPLE = "write f=10,i=12,w=8,comm=1 (one microbatch of a full rank; comm per hop) or a file"


def load_costs(path: Path, placement: Placement) -> Costs:
    """Read a costs file: JSON with ``version``, ``f``, ``i``, ``w``, ``comm`` and ``bytes``.

    ``f``, ``i`` and ``w`` are one figure per microbatch of a full rank, or a list of one figure per
    stage. ``bytes``, if there, maps ``activation`` and ``weight inputs`` likewise. ``head`` and
    ``embedding`` are lists as in `parse_costs`, and ``bytes`` may have ``logits``, one figure: what
    the last stage holds beside its layers. ``origin`` is a text for people.

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
    known = ["version", "origin", *_DUTY_OF, "comm", "bytes", *_PARTS]
    unknown = data.keys() - set(known)
    if unknown:
        raise ValueError(
            f"costs file {path} has unknown {sorted(unknown)}; known are {', '.join(known)}"
        )

    def per_stage(value: Any, what: str) -> tuple[float, ...]:
        figures = value if isinstance(value, list) else [value]
        return _per_stage(figures, placement, f"{path}, {what}")

    held, logits = None, 0.0
    if "bytes" in data:
        figures = data["bytes"]
        kinds = (Held.ACTIVATION, Held.WEIGHT_INPUTS)
        names = [kind.value for kind in kinds]
        if not isinstance(figures, dict) or figures.keys() - {_LOGITS} != set(names):
            raise ValueError(
                f"costs file {path}: bytes must give {' and '.join(names)}, and may give {_LOGITS}"
            )
        logits = figures.get(_LOGITS, 0.0)
        _check_figures(f"{path}, {_LOGITS}", [logits])
        held = {kind: per_stage(figures[kind.value], kind.value) for kind in kinds}
    seconds = {duty: per_stage(data[key], key) for key, duty in _DUTY_OF.items()}
    hop = data.get("comm", 0)
    _check_figures(f"{path}, comm", [hop])
    origin = f"{path} ({data['origin']})" if "origin" in data else str(path)
    costs = Costs(seconds, float(hop), held, origin)
    return _with_vocabulary(costs, data, float(logits), str(path))


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
    if layers.held_bytes is not None:
        data["bytes"] = {held.value: _whole(each) for held, each in layers.held_bytes.items()}
        data["bytes"][_LOGITS] = round(vocabulary.logits_bytes)
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
