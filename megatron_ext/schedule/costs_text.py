"""Text forms of costs: on the command line, and in a JSON file.

Costs are the input of every simulation, and come from users, from measurements and from estimates.
A short text is for trying things out; a file has a figure for each stage, with bytes, links and
vocabulary. Both are checked against the placement before anything is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.base.text_file import (
    LARGEST_JSON,
    how_to_rename,
    parse_json,
    read_text_file,
    write_text_file,
)
from megatron_ext.base.words import counted, shown
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import (
    Costs,
    HostCosts,
    LinkCosts,
    OverlapCosts,
    PassCosts,
    SliceCosts,
    TowerCosts,
    VocabularyCosts,
)
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Placement

FILE_VERSION = 2

# Keys of costs: passes, layers of the vocabulary (each with the passes that its numbers are for),
# copies to the host and back, and the link that copies use.
_PASSES = {"f": Kind.FORWARD, "i": Kind.BACKWARD_INPUT, "w": Kind.BACKWARD_WEIGHT}
_RECOMPUTE = "r"  # key of the seconds of a recompute pass, if they differ from the forward pass's
_PARTS = {"output_layer": "F, I and W", "embedding": "the lookup and the weight gradient"}
# The keys fixed_output_layer and fixed_embedding have those parts of the seconds that do not shrink
# with the length of a slice.
_PARTS |= {f"fixed_{key}": passes for key, passes in _PARTS.items()}
# Key of the seconds of F, I and W of an encoder on the first stage. A costs file also has the
# encoder's bytes.
_TOWER = "tower"
_COPIES = ("d2h", "h2d")
_LINK = ("link", "duplex")
# Keys that only a training which measures its costs writes; cost_model/measured/file.py reads them.
_MEASURED = ("links", "reserved", "layers", "machine")
# Keys of the costs of slices of sequences: attention's share of the passes, and the parts of a
# message's and of a pass's time that do not shrink with the slice.
_FIXED = {f"fixed_{key}": kind for key, kind in _PASSES.items()}
_SLICES = ("attention", "latency", *_FIXED)

# Key of the seconds that two overlapped passes save. In a file the value may be a table for each
# kind of backward pass.
_SAVINGS = "overlap_saving"
_TABLES = {"i": Kind.BACKWARD_INPUT, "b": Kind.FULL_BACKWARD}

_MOST_RANKS = 1_000_000  # largest number of ranks that may share a link to the host
# Bounds of all numbers, so that no sum or quotient of numbers is infinite.
LEAST, MOST = 1e-18, 1e18

# Entries among the bytes that have a single number, not one number per stage.
_DEFERRED = "output weight inputs"
_SINGLE = (Held.LOGITS.value, _DEFERRED, Held.MESSAGE.value, _TOWER)

_EXAMPLE = (
    "write f=10,i=12,w=8,comm=1 (one microbatch on all stages of a rank; comm per message) or a "
    "file"
)


def format_costs(costs: Costs) -> str:
    """Return ``costs`` as text such as ``f=10,i=12,w=8`` for `parse_costs`, with four digits."""
    if costs.unpartitioned is not None:
        return format_costs(costs.unpartitioned)
    layers = costs.layers_alone
    parts = [f"{key}={_joined(layers.seconds[kind])}" for key, kind in _PASSES.items()]
    if layers.passes.recompute:
        parts.append(f"{_RECOMPUTE}={_joined(layers.passes.recompute)}")
    parts.append(f"comm={costs.links.p2p_seconds:.4g}")
    if layers.slices.attention:
        parts.append(f"attention={_joined(layers.slices.attention)}")
    if costs.links.latency:
        parts.append(f"latency={costs.links.latency:.4g}")
    parts += [f"{key}={_joined(figures)}" for key, figures in _fixed(layers).items()]
    if costs.overlap.savings:
        parts.append(f"{_SAVINGS}={_joined(_of_like_stages(costs))}")
    if costs.vocabulary is not None:
        given = {key: getattr(costs.vocabulary, key) for key in _PARTS}
        parts += [f"{key}={_joined(figures)}" for key, figures in given.items() if any(figures)]
    if costs.tower is not None:
        parts.append(f"{_TOWER}={_joined(costs.tower.seconds)}")
    if costs.host is not None:
        parts += [f"{key}={_joined(figures)}" for key, figures in _copies(costs.host).items()]
        if costs.host.ranks_per_link > 1:
            parts.append(f"link={costs.host.ranks_per_link}")
        if not costs.host.duplex:
            parts.append("duplex=0")
    return ",".join(parts)


def outline_costs(costs: Costs, placement: Placement, *, with_copies: bool) -> str:
    """Return ``costs`` in short for people, with three digits: a microbatch on a whole rank.

    A number is a range if ranks differ. ``with_copies`` includes copies to the host and back.
    """
    costs = costs.unpartitioned or costs
    seconds = costs.without_vocabulary().seconds
    figures = {key: seconds[kind] for key, kind in _PASSES.items()}
    if with_copies and costs.host is not None:
        figures |= _copies(costs.host)
    parts = [f"{key}={_outlined(per_stage, placement)}" for key, per_stage in figures.items()]
    parts.append(f"comm={costs.links.p2p_seconds:.3g}")
    if costs.vocabulary is not None and any(output_layer := costs.vocabulary.output_layer):
        parts.append("output_layer=" + "/".join(f"{figure:.3g}" for figure in output_layer))
    return ",".join(parts)


def _outlined(per_stage: Sequence[float], placement: Placement) -> str:
    of_ranks = [sum(per_stage[stage] for stage in stages) for stages in placement.stages_of]
    return "..".join(dict.fromkeys(f"{end:.3g}" for end in (min(of_ranks), max(of_ranks))))


def _of_like_stages(costs: Costs) -> list[float]:
    """Return the seconds saved if F and I of the same stage overlap: one number for each stage."""
    table = (
        costs.overlap.savings.get(Kind.BACKWARD_INPUT) or costs.overlap.savings[Kind.FULL_BACKWARD]
    )
    return [table[stage][stage] for stage in range(costs.stages)]


def _listed(names: Iterable[str]) -> str:
    return shown(", ".join(sorted(names)))


def _joined(figures: Sequence[float]) -> str:
    return "/".join(f"{figure:.4g}" for figure in figures)


def _copies(host: HostCosts) -> dict[str, tuple[float, ...]]:
    return dict(zip(_COPIES, (host.to_host, host.from_host), strict=True))


def parse_costs(text: str, placement: Placement) -> Costs:
    """Read costs such as ``f=10,i=12,w=8,comm=1``, or the path of a JSON file (`load_costs`).

    ``f``, ``i`` and ``w`` are seconds of F, I and W, and ``comm`` (optional) those of a message.
    ``f=5/5/5/8`` gives one figure per stage; ``r=9`` is the recomputation R if it differs from F.
    ``output_layer=5/6/4`` are F, I and W of the whole output layer, ``embedding=1/1`` the whole
    embedding's lookup and weight gradient: the last and the first stage take them in addition to
    their layers. ``tower=8/9.6/6.4`` are F, I and W of an encoder, which the first stage takes in
    addition. ``d2h=6,h2d=6`` are the copies of all tensors that a microbatch of a full rank stores
    for its backward pass, to the host and back (one figure, or one per stage; h2d is d2h by
    default). ``link=2`` is the number of consecutive ranks that share a link to the host, and
    ``duplex=0`` says that a link carries one direction at a time. For slices of a sequence,
    ``attention=0.3`` is the share of f, and of i and w together, that grows with the square of the
    sequence, ``latency=0.1`` the part of comm that does not shrink with the message, and
    ``fixed_f=0.1``, ``fixed_i``, ``fixed_w``, ``fixed_output_layer`` and ``fixed_embedding`` the
    parts of f, i, w, output_layer and embedding that do not shrink with the slice. For overlapped
    passes, ``overlap_saving=3`` is the time that F and a backward pass save by running at the same
    time (one figure, or one per stage: two stages save the smaller of their figures).
    `format_costs` is the inverse.

    Raises:
        ValueError: ``text`` is neither, or a figure is missing, negative or given twice.
    """
    what = shown(text)
    if not text.strip():
        raise ValueError(f"costs {what!r} are empty; {_EXAMPLE}")
    if "=" not in text:
        return load_costs(Path(text), placement)
    figures: dict[str, list[float]] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        key = key.strip()
        if key in figures:
            raise ValueError(f"costs {what!r}: {shown(key)!r} is given twice; {_EXAMPLE}")
        try:
            figures[key] = [float(figure) for figure in value.split("/")]
        except ValueError:
            raise ValueError(f"costs {what!r}: {shown(part)!r} has no number; {_EXAMPLE}") from None
    known = {*_PASSES, _RECOMPUTE, "comm", *_PARTS, _TOWER, *_COPIES, *_LINK}
    known |= {*_SLICES, _SAVINGS}
    unknown = figures.keys() - known
    missing = _PASSES.keys() - figures.keys()
    if unknown or missing:
        wrong = _listed(unknown or missing) + (" is unknown" if unknown else " is missing")
        raise ValueError(f"costs {what!r}: {wrong}; {_EXAMPLE}")
    seconds = {kind: _per_stage(figures[key], placement, what) for key, kind in _PASSES.items()}
    p2p_seconds = figures.get("comm", [0.0])
    if len(p2p_seconds) > 1:
        raise ValueError(f"costs {what!r}: comm is a single number; {_EXAMPLE}")
    _check_figures(what, p2p_seconds)
    recompute = _per_stage(figures[_RECOMPUTE], placement, what) if _RECOMPUTE in figures else ()
    costs = Costs(PassCosts(seconds, recompute=recompute), LinkCosts(p2p_seconds[0]))
    costs = _with_slices(costs, figures, placement, what)
    costs = _with_savings(costs, figures, placement, what)
    costs = _with_tower(_with_vocabulary(costs, figures, (0.0, 0.0), what), figures, 0.0, what)
    return _with_host(costs, figures, placement, what)


def _with_slices(
    costs: Costs, figures: Mapping[str, Any], placement: Placement, what: str
) -> Costs:
    """Return ``costs`` with those entries of ``figures`` that describe slices of a sequence."""
    given = {
        key: figures[key] if isinstance(figures[key], list) else [figures[key]]
        for key in _SLICES
        if key in figures
    }
    for key, values in given.items():
        _check_figures(f"{what}, {key}", values)
    shares = given.get("attention", [])
    if len(shares) not in (0, 1, costs.stages) or any(share > 1 for share in shares):
        raise ValueError(
            f"costs {what}: attention is a share of passes from 0 to 1, a single number or one "
            f"number per stage, not {shown(_joined(shares))}"
        )
    latency = given.get("latency", [0.0])
    if len(latency) != 1 or latency[0] > costs.links.p2p_seconds:
        raise ValueError(
            f"costs {what}: latency is the part of comm={costs.links.p2p_seconds:g} that does not "
            "depend on a message's length: a single number up to comm, not "
            f"{shown(_joined(latency))}"
        )
    fixed: dict[Kind, tuple[float, ...]] = {}
    for key, kind in _FIXED.items():
        values = given.get(key, [])
        if len(values) not in (0, 1, costs.stages):
            raise ValueError(
                f"costs {what}: {key} is the time of a slice that does not depend on its length: "
                f"one number for all stages of a rank, or one number per stage, not "
                f"{_joined(values)}"
            )
        if values:
            fixed[kind] = _per_stage(values, placement, what)
    return costs.with_slices(attention=_of_all(shares, costs.stages), fixed=fixed).with_links(
        latency=float(latency[0])
    )


def _fixed(costs: Costs) -> dict[str, tuple[float, ...]]:
    """Return the seconds of passes that do not shrink with a slice, by their keys in the text form.

    Figures of zero are included, since a key that is missing is estimated.
    """
    fixed = costs.slices.fixed
    return {key: fixed[kind] for key, kind in _FIXED.items() if kind in fixed}


def _of_all(figures: Sequence[float], stages: int) -> tuple[float, ...]:
    """Return one number for each stage; a single given number is repeated for all stages."""
    return tuple(map(float, figures)) * (stages if len(figures) == 1 else 1)


def _with_savings(costs: Costs, given: Mapping[str, Any], placement: Placement, what: str) -> Costs:
    """Return ``costs`` with the seconds that overlapped passes save, if ``given`` has them."""
    if _SAVINGS not in given:
        return costs
    value, what = given[_SAVINGS], f"{what}, {_SAVINGS}"
    if isinstance(value, dict):
        return replace(costs, overlap=OverlapCosts(_tables(value, costs.stages, what)))
    figures = _per_stage(value if isinstance(value, list) else [value], placement, what)
    table = tuple(tuple(min(f, b) for b in figures) for f in figures)
    return replace(costs, overlap=OverlapCosts({Kind.BACKWARD_INPUT: table}))


def _tables(
    value: Mapping[str, Any], stages: int, what: str
) -> dict[Kind, tuple[tuple[float, ...], ...]]:
    tables = {}
    for key, rows in value.items():
        is_table = key in _TABLES and isinstance(rows, list) and len(rows) == stages
        if not is_table or any(not isinstance(r, list) or len(r) != stages for r in rows):
            raise ValueError(
                f"costs {what}: this is neither a number, nor one number per stage, nor tables "
                f"under the keys {_listed(_TABLES)} (the kind of backward pass); write in each "
                "table a row for each stage of the forward pass, with a number for each stage of "
                f"the backward pass; there are {counted(stages, 'stage')}"
            )
        for row in rows:
            _check_figures(what, row)
        tables[_TABLES[key]] = tuple(tuple(map(float, row)) for row in rows)
    return tables


def _with_vocabulary(
    costs: Costs, figures: Mapping[str, Any], of_output: tuple[float, float], what: str
) -> Costs:
    """Return ``costs`` with the seconds of embedding and output layer (keys of `_PARTS`), if given.

    ``of_output`` are the bytes that the output layer holds from F to I and, if its weight gradient
    is deferred, from I to W.
    """
    parts: dict[str, Any] = {}
    for key, passes in _PARTS.items():
        if key not in figures:
            continue
        size = len(getattr(VocabularyCosts, key))
        part = figures[key] if isinstance(figures[key], list) else [figures[key]]
        if len(part) != size:
            raise ValueError(
                f"costs {what}: {key} takes {size} numbers, not {len(part)}: the times of "
                f"{passes} for one microbatch"
            )
        _check_figures(f"{what}, {key}", part)
        parts[key] = tuple(map(float, part))
    if not parts and not any(of_output):
        return costs
    logits, deferred = of_output
    return costs.with_vocabulary(
        VocabularyCosts(**parts, logits_bytes=logits, deferred_bytes=deferred)
    )


def _with_tower(costs: Costs, figures: Mapping[str, Any], activation: float, what: str) -> Costs:
    """Return ``costs`` with the encoder (key ``tower``) of ``figures``, if there is one."""
    if _TOWER not in figures:
        return costs
    tower = figures[_TOWER] if isinstance(figures[_TOWER], list) else [figures[_TOWER]]
    if len(tower) != 3:
        raise ValueError(
            f"costs {what}: {_TOWER} takes 3 numbers, the times of F, I and W of a microbatch in "
            f"an encoder on the first stage, not {len(tower)}"
        )
    _check_figures(f"{what}, {_TOWER}", tower)
    forward, input_gradient, weight_gradient = map(float, tower)
    return costs.with_tower(TowerCosts((forward, input_gradient, weight_gradient), activation))


def _with_host(costs: Costs, given: Mapping[str, Any], placement: Placement, what: str) -> Costs:
    """Return ``costs`` with the copies to the host and back of ``given``, if there are any."""
    figures = {
        key: given[key] if isinstance(given[key], list) else [given[key]]
        for key in (*_COPIES, *_LINK)
        if key in given
    }
    if not figures:
        return costs
    if "d2h" not in figures:
        raise ValueError(
            f"costs {what}: {min(figures)}= needs d2h=; add d2h=, the time of a copy to the host"
        )
    for key, allowed in (("link", f"1 to {_MOST_RANKS:,} ranks"), ("duplex", "0 or 1")):
        value = figures.get(key, [1])
        _check_figures(f"{what}, {key}", value)
        if value not in ([0], [1]) if key == "duplex" else not _is_count(value):
            raise ValueError(f"costs {what}: {key} is {allowed}, not {shown(_joined(value))}")
    per_stage = {
        key: _per_stage(figures.get(key, figures["d2h"]), placement, f"{what}, {key}")
        for key in _COPIES
    }
    link, duplex = figures.get("link", [1])[0], figures.get("duplex", [1])[0]
    return costs.with_host(per_stage["d2h"], per_stage["h2d"], int(link), bool(duplex))


def _is_count(value: list[Any]) -> bool:
    return len(value) == 1 and value[0] == int(value[0]) and 1 <= value[0] <= _MOST_RANKS


def load_costs(path: Path, placement: Placement) -> Costs:
    """Read a costs file: JSON with ``version``, ``f``, ``i``, ``w``, ``comm`` and ``bytes``.

    ``f``, ``i`` and ``w`` are one figure per microbatch of a full rank, or a list of one figure per
    stage; so is the optional ``r``. The optional ``bytes`` maps ``activation`` and ``weight
    inputs`` likewise. ``output_layer`` and ``embedding`` are lists as in `parse_costs`, and
    ``bytes`` may have four single figures: ``logits``, which the last stage holds from F to I in
    addition to its layers, ``output weight inputs``, which it holds from I to W if the output
    layer's weight gradient waits (as many as ``logits`` if the file does not say), ``tower``, which
    an encoder on the first stage stores, and ``message``, of each message from stage to stage.
    ``bytes`` may also have ``keys and values``, a part of ``activation`` that is given like it.
    ``overlap_saving`` may also map ``i`` and ``b``, the kind of the overlapped backward pass, each
    to a table: a row per stage of F, a figure in it per stage of the backward pass. ``attention``,
    ``latency``, ``fixed_f``, ``fixed_i``, ``fixed_w``, ``fixed_output_layer``,
    ``fixed_embedding``, ``d2h``, ``h2d``, ``link`` and ``duplex`` are those of `parse_costs`, and
    ``origin`` is a text for people.

    Raises:
        ValueError: no such file, not JSON, another version, lists of another length, or keys that
            are missing or unknown.
    """
    data = read_costs_file(path)

    def per_stage(value: Any, what: str) -> tuple[float, ...]:
        figures = value if isinstance(value, list) else [value]
        return _per_stage(figures, placement, f"{path}, {what}")

    held, single = None, dict.fromkeys(_SINGLE, 0.0)
    keys_values: tuple[float, ...] = ()
    if "bytes" in data:
        figures = data["bytes"]
        of_stages = (Held.ACTIVATION, Held.WEIGHT_INPUTS)
        names = [what.value for what in of_stages]
        optional = (*_SINGLE, Held.KEYS_VALUES.value)
        if not isinstance(figures, dict) or figures.keys() - set(optional) != set(names):
            raise ValueError(
                f"costs file {path}: bytes must give {' and '.join(names)}, and may give "
                f"{' and '.join(optional)}"
            )
        if Held.KEYS_VALUES.value in figures:
            keys_values = per_stage(figures[Held.KEYS_VALUES.value], Held.KEYS_VALUES.value)
        for name in _SINGLE:
            default = single[Held.LOGITS.value] if name == _DEFERRED else 0.0
            single[name] = figures.get(name, default)
            _check_figures(f"{path}, {name}", [single[name]])
        held = {what: per_stage(figures[what.value], what.value) for what in of_stages}
    seconds = {kind: per_stage(data[key], key) for key, kind in _PASSES.items()}
    p2p_seconds = data.get("comm", 0)
    _check_figures(f"{path}, comm", [p2p_seconds])
    origin = f"{path} ({shown(data['origin'], 300)})" if "origin" in data else str(path)
    if not any(map(any, seconds.values())):
        raise ValueError(f"costs file {path}: all passes cost nothing; at least one must cost")
    message_bytes = float(single[Held.MESSAGE.value])
    costs = Costs(
        PassCosts(
            seconds,
            held_bytes=held,
            recompute=per_stage(data[_RECOMPUTE], _RECOMPUTE) if _RECOMPUTE in data else (),
        ),
        LinkCosts(float(p2p_seconds), message_bytes=message_bytes),
        slices=SliceCosts(keys_values=keys_values),
        origin=origin,
    )
    costs = _with_slices(costs, data, placement, str(path))
    costs = _with_savings(costs, data, placement, str(path))
    of_output = float(single[Held.LOGITS.value]), float(single[_DEFERRED])
    costs = _with_vocabulary(costs, data, of_output, str(path))
    costs = _with_tower(costs, data, float(single[_TOWER]), str(path))
    return _with_host(costs, data, placement, str(path))


def read_costs_file(path: Path) -> dict[str, Any]:
    """Return the entries of the costs file ``path``. Their keys are checked, but not their values.

    Raises:
        ValueError: no such file, not JSON, another version, or keys that are missing or unknown.
    """
    text = _text_of(path)
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ValueError(f"costs file {path} is not JSON: {error}") from None
    if not isinstance(data, dict) or "version" not in data:
        raise ValueError(f'costs file {path}: "version": {FILE_VERSION} is expected at the top')
    if (version := data["version"]) != FILE_VERSION:
        raise ValueError(
            f"costs file {path} is of version {shown(version)}, and only {FILE_VERSION} is known: "
            f"{how_to_rename(version, FILE_VERSION)}measure it anew with --pipeline-costs profile, "
            f"or {_EXAMPLE}"
        )
    missing = _PASSES.keys() - data.keys()
    if missing:
        raise ValueError(f"costs file {path} lacks {_listed(missing)}; {_EXAMPLE}")
    known = ["version", "origin", *_PASSES, _RECOMPUTE, "comm", "bytes", *_PARTS, _TOWER, *_COPIES]
    known += [*_LINK, *_SLICES, _SAVINGS, *_MEASURED]
    unknown = data.keys() - set(known)
    if unknown:
        raise ValueError(
            f"costs file {path}: {_listed(unknown)} is unknown; known are {', '.join(known)}; "
            f"drop it, or measure the file anew with --pipeline-costs profile"
        )
    if not isinstance(data.get("origin", ""), str):
        raise ValueError(
            f"costs file {path}: origin is {shown(json.dumps(data['origin']))}; write a text that "
            f"says how the costs came about, or omit it"
        )
    return data


def _text_of(path: Path) -> str:
    try:
        return read_text_file(path, "costs file", LARGEST_JSON)
    except ValueError as error:
        raise ValueError(f"{error}; {_EXAMPLE}") from None


def save_costs(costs: Costs, path: Path, measured: Mapping[str, Any] | None = None) -> None:
    """Write ``costs`` to the JSON file ``path``, with the additional entries ``measured``.

    `load_costs` reads the file.

    Raises:
        OSError: the file cannot be written.
    """
    assert costs.unpartitioned is None
    layers = costs.layers_alone
    vocabulary = costs.vocabulary or VocabularyCosts()
    data: dict[str, Any] = {"version": FILE_VERSION, "origin": costs.origin}
    data |= {key: rounded(layers.seconds[kind]) for key, kind in _PASSES.items()}
    if layers.passes.recompute:
        data[_RECOMPUTE] = rounded(layers.passes.recompute)
    data["comm"] = rounded([costs.links.p2p_seconds])[0]
    if layers.slices.attention:
        data["attention"] = rounded(layers.slices.attention)
    if costs.links.latency:
        data["latency"] = rounded([costs.links.latency])[0]
    data |= {key: rounded(figures) for key, figures in _fixed(layers).items()}
    if costs.overlap.savings:
        data[_SAVINGS] = {
            key: [rounded(row) for row in costs.overlap.savings[kind]]
            for key, kind in _TABLES.items()
            if kind in costs.overlap.savings
        }
    for key in _PARTS:
        if any(figures := getattr(vocabulary, key)):
            data[key] = rounded(figures)
    if costs.tower is not None:
        data[_TOWER] = rounded(costs.tower.seconds)
    if costs.host is not None:
        data |= {key: rounded(figures) for key, figures in _copies(costs.host).items()}
        data |= {"link": costs.host.ranks_per_link, "duplex": int(costs.host.duplex)}
    if layers.held_bytes is not None:
        data["bytes"] = _bytes_of(costs, layers.held_bytes)
    data |= measured or {}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    write_text_file(path, "{\n" + ",\n".join(lines) + "\n}\n")


def _bytes_of(costs: Costs, held: Mapping[Held, tuple[float, ...]]) -> dict[str, Any]:
    """Return the entry ``bytes`` of a costs file.

    ``held`` has the bytes that a microbatch's passes through the layers hold, by kind of memory.
    The entry adds the bytes of keys and values, logits, messages and the encoder.
    """
    data: dict[str, Any] = {what.value: _integers(figures) for what, figures in held.items()}
    if costs.slices.keys_values:
        data[Held.KEYS_VALUES.value] = _integers(costs.slices.keys_values)
    vocabulary = costs.vocabulary or VocabularyCosts()
    data[Held.LOGITS.value] = round(vocabulary.logits_bytes)
    data[_DEFERRED] = round(vocabulary.deferred_bytes)
    data[Held.MESSAGE.value] = round(costs.links.message_bytes)
    if costs.tower is not None:
        data[_TOWER] = round(costs.tower.activation)
    return data


def rounded(figures: Sequence[float]) -> list[float]:
    """Return ``figures`` rounded to six significant digits."""
    return [float(f"{figure:.6g}") for figure in figures]


def _integers(figures: Sequence[float]) -> list[int]:
    return [round(figure) for figure in figures]


def _per_stage(figures: Sequence[Any], placement: Placement, what: str) -> tuple[float, ...]:
    """Return one number per stage of the placement, in seconds or bytes.

    A single number is for a whole rank, so each of the rank's v chunks gets 1/v of it.
    """
    _check_figures(what, figures)
    if len(figures) == 1:
        return (float(figures[0]) / placement.chunks,) * placement.stages
    if len(figures) != placement.stages:
        raise ValueError(
            f"costs {what}: {len(figures)} figures for {placement.stages} stages; give one figure "
            f"for a microbatch on all stages of a rank, or one figure per stage"
        )
    return tuple(float(figure) for figure in figures)


def _check_figures(what: str, figures: Sequence[Any]) -> None:
    for figure in figures:
        is_number = isinstance(figure, int | float) and not isinstance(figure, bool)
        if not is_number or not 0 <= figure < MOST:
            raise ValueError(
                f"costs {what}: {shown(repr(figure))} is no cost; a cost is a number from 0 to "
                f"below {MOST:g}"
            )
        if 0 < figure < LEAST:
            raise ValueError(
                f"costs {what}: {figure!r} is too small; write 0, or costs of at least {LEAST:g}"
            )
