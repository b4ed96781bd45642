"""Tests of the costs, limits and schedule names that users write."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given

import megatron_ext
from megatron_ext.base.words import shown
from megatron_ext.compile import registry
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, memory_curve, peaks
from megatron_ext.compile.program.simulate import simulate_unproved
from megatron_ext.compile.registry import FamilyEntry, choose, entries
from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.schedule.action import Kind, parse_action
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts, VocabularyCosts, uniform
from megatron_ext.schedule.costs_text import (
    format_costs,
    load_costs,
    outline_costs,
    parse_costs,
    save_costs,
)
from megatron_ext.schedule.kinds import RULES, Cost, Held, Lane, Where
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import Placement, line
from megatron_ext.schedule.problem import Problem, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.bounds import lower_bound
from megatron_ext.written_settings import from_argv, from_environment
from tests.helpers.random_schedules import PROPERTY, random_costs, seeds
from tests.helpers.schedules import line_problem, rows_of, written

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
LINE = line(2)
LOOP = Placement("loop", (0, 1, 0, 1))

# --- costs


@pytest.mark.parametrize("tower", ["", ",tower=4/5/3", ",tower=4/5/3,embedding=1/2"])
def test_the_share_of_attention_is_written_as_it_was_given(tower: str, tmp_path: Path) -> None:
    """The text and the file of costs have the share of attention that was given. With a vision
    tower, the reduced share of the first stage, whose F takes longer, used to be written, and
    reduced once more when it was read: 0.3 became 0.21, then 0.15."""
    placement = line(4)
    costs = parse_costs(f"f=10,i=12,w=8,comm=1,attention=0.3{tower}", placement)
    assert "attention=0.3/0.3/0.3/0.3" in format_costs(costs)
    file = tmp_path / "costs.json"
    save_costs(costs, file)
    assert load_costs(file, placement).slices.attention == pytest.approx(costs.slices.attention)


def test_costs_are_a_full_ranks() -> None:
    on_line = parse_costs("f=10,i=12,w=8,comm=1", LINE)
    assert on_line.seconds == {F: (10, 10), I: (12, 12), W: (8, 8)}
    assert (on_line.links.p2p_seconds, on_line.held_bytes, on_line.origin) == (1, None, "given")
    in_chunks = parse_costs(" w=8, f=10 ,i=12", LOOP)
    assert in_chunks.seconds == {F: (5,) * 4, I: (6,) * 4, W: (4,) * 4}
    assert in_chunks.links.p2p_seconds == 0


def test_costs_may_be_given_per_stage() -> None:
    costs = parse_costs("f=1/2/3/4,i=6,w=0/0/0/9,comm=0.5", LOOP)
    assert costs.seconds == {F: (1, 2, 3, 4), I: (3,) * 4, W: (0, 0, 0, 9)}


@PROPERTY
@given(seeds)
def test_costs_read_back_what_they_print(seed: int) -> None:
    costs = random_costs(Random(seed), LOOP)
    read = parse_costs(format_costs(costs), LOOP)
    assert read.links.p2p_seconds == pytest.approx(costs.links.p2p_seconds, rel=1e-3)
    for kind, figures in costs.seconds.items():
        assert read.seconds[kind] == pytest.approx(figures, rel=1e-3)


@pytest.mark.parametrize(
    ("action", "cost"),
    [
        ("0F0", 1), ("1F3", 2), ("0I0", 10), ("1W0", 200), ("0B0", 110), ("1B0", 220),
        ("0SEND_F0", 7), ("1SEND_B0", 7), ("1RECV_F0", 0), ("0RECV_B0", 0), ("0WAIT_F0", 0),
    ],
)  # fmt: skip
def test_cost_of_an_action(action: str, cost: float) -> None:
    costs = Costs(PassCosts({F: (1, 2), I: (10, 20), W: (100, 200)}), LinkCosts(7))
    assert costs.of(parse_action(action)) == cost


def test_every_kind_has_a_cost_that_fits_its_lane() -> None:
    """Every kind of action has a cost that fits what it does. A pass whose rule named no cost would
    take no time."""
    own = {
        Lane.COMPUTE: {Cost.PASS, Cost.REPEATED_PASS},
        Lane.SEND: {Cost.P2P_SECONDS},
        Lane.COLLECTIVE: {Cost.COLLECTIVE},
        Lane.TO_HOST: {Cost.COPY},
        Lane.FROM_HOST: {Cost.COPY},
    }
    for rule in RULES.values():
        free = rule.where is Where.RANK or rule.lane in (Lane.WAIT, Lane.RECEIVE)
        assert rule.cost in ({Cost.NOTHING} if free else own[rule.lane]), rule.kind
        assert (rule.cost is Cost.REPEATED_PASS) == (rule.repeats is not None)


def test_costs_of_a_whole_rank() -> None:
    costs = Costs(
        PassCosts(
            {F: (1, 2, 3, 4), I: (5, 6, 7, 8), W: (0, 0, 0, 9)},
            held_bytes={Held.ACTIVATION: (1, 1, 1, 2), Held.WEIGHT_INPUTS: (3, 3, 3, 3)},
        ),
        LinkCosts(2),
        origin="here",
    )
    assert costs.per_rank(LOOP) == Costs(
        PassCosts(
            {F: (4, 6), I: (12, 14), W: (0, 9)},
            held_bytes={Held.ACTIVATION: (2, 3), Held.WEIGHT_INPUTS: (6, 6)},
        ),
        LinkCosts(2),
        origin="here",
    )


def test_the_vocabulary_is_added_to_the_first_and_the_last_stage() -> None:
    costs = parse_costs("f=10,i=12,w=8,output_layer=5/6/4,embedding=1/2", LOOP)
    assert costs.seconds == {F: (6, 5, 5, 10), I: (6, 6, 6, 12), W: (6, 4, 4, 8)}
    assert costs.vocabulary == VocabularyCosts((5, 6, 4), (1, 2))
    assert costs.without_vocabulary() == parse_costs("f=10,i=12,w=8", LOOP)
    assert parse_costs("f=10,i=12,w=8", LOOP).vocabulary is None


def test_r_takes_what_f_does_unless_it_is_given(tmp_path: Path) -> None:
    """R takes as long as F unless it is given. On the last stage R reruns the output layer, and on
    the first one the embedding lookup."""
    text = "f=10,i=12,w=8,comm=1,output_layer=5/6/4,embedding=1/2"
    as_f, given = (parse_costs(text + more, LOOP) for more in ("", ",r=14"))
    r = [parse_action(f"{stage}R0") for stage in range(4)]
    assert [as_f.of(action) for action in r] == [6, 5, 5, 10] == list(as_f.seconds[F])
    assert [given.of(action) for action in r] == [8, 7, 7, 12]
    assert format_costs(given.without_vocabulary()).startswith(
        "f=5/5/5/5,i=6/6/6/6,w=4/4/4/4,r=7/7/7/7"
    )
    shared = share_vocabulary(given, LOOP, VocabularyParallel.TWO)
    assert [shared.of(action) for action in r] == [7, 7, 7, 7]
    assert given.per_rank(LOOP).passes.recompute == (15, 19)
    save_costs(given, tmp_path / "costs.json")
    read = load_costs(tmp_path / "costs.json", LOOP)
    assert (read.seconds, read.passes.recompute) == (given.seconds, given.passes.recompute)


@PROPERTY
@given(seeds)
def test_a_vocabulary_reads_back_what_it_prints(seed: int) -> None:
    random = Random(seed)
    a, b, c, d, e = (random.choice([0.0, 0.37, 61.5]) for _ in range(5))
    whole = random_costs(random, LOOP).with_vocabulary(VocabularyCosts((a, b, c), (d, e)))
    shared = share_vocabulary(whole, LOOP, VocabularyParallel.TWO)
    assert format_costs(shared) == format_costs(whole)
    read = parse_costs(format_costs(whole), LOOP)
    assert (read.vocabulary or VocabularyCosts()) == whole.vocabulary
    for kind, figures in whole.seconds.items():
        assert read.seconds[kind] == pytest.approx(figures, rel=1e-3)


@pytest.mark.parametrize(
    ("how", "passes"),
    [
        (VocabularyParallel.ONE, {"0S0": 2.5, "1SI0": 3, "1SW0": 2, "0E0": 0.5, "0EW0": 1}),
        (VocabularyParallel.TWO, {"0S0": 5.5, "1SI0": 0, "1SW0": 2, "0E0": 0.5, "0EW0": 1}),
    ],
)
def test_shares_of_the_vocabulary(how: VocabularyParallel, passes: dict[str, float]) -> None:
    """The first stage of each rank computes the rank's share of the vocabulary. In variant 2 of the
    split vocabulary, the pass S contains both the logits and their input gradient."""
    whole = parse_costs("f=10,i=12,w=8,comm=1,output_layer=5/6/4,embedding=1/2", LOOP)
    costs = share_vocabulary(whole, LOOP, how)
    passes |= {"0F0": 5, "3I0": 6, "3W0": 4, "1L0": 0, "1BCAST_S0": 1, "0GATHER_S0": 1, "2S0": 0}
    assert {text: costs.of(parse_action(text)) for text in passes} == passes
    assert costs.unpartitioned == whole


HOW = (
    "write f=10,i=12,w=8,comm=1 (one microbatch on all stages of a rank; comm per message) or a "
    "file"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f=10,i=12", f"costs 'f=10,i=12': w is missing; {HOW}"),
        ("f=1,i=1,w=1,b=2", f"costs 'f=1,i=1,w=1,b=2': b is unknown; {HOW}"),
        ("f=1,i=1,w=one", f"costs 'f=1,i=1,w=one': 'w=one' has no number; {HOW}"),
        ("f=1,i=1,w=1,", f"costs 'f=1,i=1,w=1,': '' has no number; {HOW}"),
        ("f=1,i=1,w=1, f=2", f"costs 'f=1,i=1,w=1, f=2': 'f' is given twice; {HOW}"),
        ("f=1,i=1,w=-1", "-1.0 is no cost; a cost is a number from 0"),
        ("f=1,i=nan,w=1", "nan is no cost"),
        ("f=inf,i=1,w=1", "inf is no cost"),
        ("f=1,i=1,w=1,comm=-2", "-2.0 is no cost"),
        ("f=1,i=1,w=1,comm=1/2", f"comm is a single number; {HOW}"),
        (
            "f=1,i=1,w=1,output_layer=5",
            "output_layer takes 3 numbers, not 1: the times of F, I and W",
        ),
        ("f=1,i=1,w=1,output_layer=1/2/-3", "output_layer: -3.0 is no cost"),
        (
            "f=1,i=1,w=1,embedding=1/2/3",
            "embedding takes 2 numbers, not 3: the times of",
        ),
        (
            "f=1/2/3,i=1,w=1",
            "3 figures for 2 stages; give one figure for a microbatch on all stages",
        ),
        ("no/such/file.json", "costs file no/such/file.json cannot be read:"),
        ("f=1,i=1,w=1e308", "1e+308 is no cost; a cost is a number from 0 to below 1e+18"),
        ("f=1,i=1,w=1,d2h=1,link=inf", "link: inf is no cost"),
        ("f=1,i=1,w=1,d2h=1,link=1e300", "link: 1e+300 is no cost"),
        ("f=1,i=1,w=1,d2h=1,link=1e9", "link is 1 to 1,000,000 ranks, not 1e+09"),
        ("f=1,i=1,w=1,d2h=1,link=1.5", "link is 1 to 1,000,000 ranks, not 1.5"),
        ("f=1,i=1,w=1,d2h=1,duplex=nan", "duplex: nan is no cost"),
    ],
)
def test_bad_costs(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_costs(text, LINE)
    assert message in str(refusal.value)
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "f=1,i=1,w=1," + "x" * 100_000,
        "f=1,i=1,w=" + "1/" * 50_000 + "x",
        ",".join(f"k{n}=1" for n in range(10_000)),
        "f=1,i=1,w=1,attention=" + "2/" * 50_000 + "2",
        "x" * 100_000,
    ],
    ids=["part", "figure", "keys", "shares", "path"],
)
def test_what_is_wrong_is_shown_in_a_line(text: str) -> None:
    """The error shows a wrong value in one line. It used to print the whole value, however long it
    was."""
    with pytest.raises(ValueError) as refusal:
        parse_costs(text, LINE)
    assert len(str(refusal.value)) < 600


GOOD_FILE = {"version": 2, "f": 10, "i": [12, 14], "w": 8, "comm": 0.5}


def written_costs(folder: Path, data: Any) -> Path:
    path = folder / "costs.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_costs_from_a_file(tmp_path: Path) -> None:
    path = written_costs(tmp_path, GOOD_FILE)
    costs = parse_costs(str(path), LINE)
    assert costs == load_costs(path, LINE)
    assert costs.seconds == {F: (10, 10), I: (12, 14), W: (8, 8)}
    assert (costs.links.p2p_seconds, costs.held_bytes, costs.origin) == (0.5, None, str(path))


def test_bytes_from_a_file(tmp_path: Path) -> None:
    held = {"activation": [3e9, 4e9], "weight inputs": 1e9}
    costs = load_costs(written_costs(tmp_path, GOOD_FILE | {"bytes": held}), LINE)
    assert costs.held_bytes == {Held.ACTIVATION: (3e9, 4e9), Held.WEIGHT_INPUTS: (1e9, 1e9)}


def test_the_vocabulary_from_a_file(tmp_path: Path) -> None:
    held = {"activation": 3e9, "weight inputs": 1e9, "logits": 2e9}
    data = GOOD_FILE | {"output_layer": [5, 6, 4], "embedding": [1, 2], "bytes": held}
    as_logits = load_costs(written_costs(tmp_path, data), LINE)
    assert as_logits.vocabulary == VocabularyCosts((5, 6, 4), (1, 2), 2e9, 2e9)
    held["output weight inputs"] = 1.5e9
    costs = load_costs(written_costs(tmp_path, data), LINE)
    assert costs.seconds == {F: (11, 15), I: (12, 20), W: (10, 12)}
    assert costs.held_bytes == {Held.ACTIVATION: (3e9, 5e9), Held.WEIGHT_INPUTS: (1e9, 2.5e9)}
    assert costs.vocabulary == VocabularyCosts((5, 6, 4), (1, 2), 2e9, 1.5e9)
    shared = share_vocabulary(costs, LINE, VocabularyParallel.ONE)
    assert shared.held_bytes == {
        Held.ACTIVATION: (3e9, 3e9),
        Held.WEIGHT_INPUTS: (1e9, 1e9),
        Held.LOGITS: (1e9, 1e9),
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "is not JSON"),
        (
            GOOD_FILE | {"output_layer": [5, 6]},
            "output_layer takes 3 numbers, not 2: the times of F, I and W",
        ),
        (GOOD_FILE | {"embedding": [5, "6"]}, "embedding: '6' is no cost"),
        (
            GOOD_FILE | {"bytes": {"activation": 1, "weight inputs": 1, "logits": [1, 2]}},
            "logits: [1, 2] is no cost",
        ),
        ([1], '"version": 2 is expected at the top'),
        ({"f": 1, "i": 1, "w": 1}, '"version": 2 is expected at the top'),
        (GOOD_FILE | {"version": 0}, "is of version 0, and only 2 is known: measure it anew"),
        (GOOD_FILE | {"version": 3}, "is of version 3, and only 2 is known: measure it anew"),
        ({"version": 2, "f": 1, "w": 1}, f"lacks i; {HOW}"),
        (
            GOOD_FILE | {"com": 1},
            "com is unknown; known are version, origin, f, i, w, r, comm, bytes",
        ),
        (
            GOOD_FILE | {"launch": 1},  # a key of files from before `fixed_f`
            "machine; drop it, or measure the file anew with --pipeline-costs profile",
        ),
        (GOOD_FILE | {"i": [1, 2, 3]}, "i: 3 figures for 2 stages"),
        (GOOD_FILE | {"i": [1, -2]}, "i: -2 is no cost; a cost is a number from 0"),
        (GOOD_FILE | {"f": "10"}, "f: '10' is no cost"),
        (GOOD_FILE | {"f": True}, "f: True is no cost"),
        (GOOD_FILE | {"comm": -1}, "comm: -1 is no cost"),
        (GOOD_FILE | {"comm": [1, 2]}, "comm: [1, 2] is no cost"),
        (GOOD_FILE | {"comm": None}, "comm: None is no cost"),
        # The errors of the next cases used to be wrong: a list was shown as if it were a text; the
        # error about a link of NaN named neither the file nor the key; an empty list ended in an
        # IndexError; the error about a long integer named no file.
        (GOOD_FILE | {"origin": ["a", "list"]}, 'origin is ["a", "list"]; write a text'),
        (GOOD_FILE | {"d2h": 1, "link": float("nan")}, "link: nan is no cost"),
        (GOOD_FILE | {"d2h": 1, "link": None}, "link: None is no cost"),
        (GOOD_FILE | {"d2h": 1, "duplex": "1"}, "duplex: '1' is no cost"),
        (GOOD_FILE | {"latency": []}, "latency is the part of comm"),
        (GOOD_FILE | {"f": 0, "i": 0, "w": 0}, "all passes cost nothing"),
        ('{"version": 2, "f": ' + "9" * 5000 + "}", "is not JSON: Exceeds the limit"),
        (GOOD_FILE | {"bytes": 5}, "bytes must give activation and weight inputs"),
        (GOOD_FILE | {"bytes": {"activation": 1}}, "bytes must give activation and weight inputs"),
        (
            GOOD_FILE | {"bytes": {"activation": 1, "weights": 1}},
            "bytes must give activation and weight inputs",
        ),
    ],
)
def test_bad_costs_files(data: Any, message: str, tmp_path: Path) -> None:
    """A wrong value in a costs file is refused. It is not taken for a missing one, which means that
    messages cost 0 or bytes are unknown."""
    path = written_costs(tmp_path, data)
    with pytest.raises(ValueError) as refusal:
        load_costs(path, LINE)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)


# --- memory


@pytest.mark.parametrize(
    ("text", "limit", "printed"),
    [
        ("5", MemoryLimit(microbatches=5), "5 microbatches"),
        ("2.5", MemoryLimit(microbatches=2.5), "2.5 microbatches"),
        # 1F1B holds min(8, 32) microbatches.
        (" 0.5x ", MemoryLimit(microbatches=4), "4 microbatches"),
        ("60GiB", MemoryLimit(bytes=60 * 2**30), "60GiB"),
        ("512MiB", MemoryLimit(bytes=2**29), "0.5GiB"),
        ("1.5TiB", MemoryLimit(bytes=3 * 2**39), "1.5TiB"),
    ],
)
def test_limits(text: str, limit: MemoryLimit, printed: str) -> None:
    assert parse_limit(text, ranks=8, microbatches=32) == limit
    assert str(limit) == printed


def test_a_share_is_of_what_1f1b_can_hold() -> None:
    assert parse_limit("1x", ranks=8, microbatches=3) == MemoryLimit(microbatches=3)


@pytest.mark.parametrize(
    "text", ["", "0", "0x", "0GiB", "9" * 400, "-1", "60GB", "60 GiB", "x", "5y", "1e3"]
)
def test_bad_limits(text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        parse_limit(text, ranks=8, microbatches=32)
    assert str(refusal.value) == (
        f"memory limit {shown(text)!r} is not understood: write microbatches of a rank (5), "
        f"a share of 1F1B's peak (0.5x), or bytes (60GiB); omit it for no limit"
    )


def test_memory_curve_in_microbatches() -> None:
    """A memory curve in microbatches rises at F and falls at W or B, in units of a whole rank. I
    frees nothing."""
    schedule = written("0F0 1F0 0F1 1F1 1B0 1I1 0I0 1W1 0I1 0W0 0W1", (0, 0))
    curve = memory_curve(schedule.rows[0], in_microbatches(schedule))
    assert curve == [0.5, 1, 1.5, 2, 2, 1.5, 1.5, 1.5, 1, 1, 0.5]
    assert peaks(schedule, in_microbatches(schedule)) == [2]


def test_memory_curve_in_bytes() -> None:
    """A memory curve in bytes falls at the end of I, where the tensors that the backward pass needs
    (10) give way to those that W needs (4)."""
    costs = uniform(line(1), 1, 1, 1).with_passes(
        held_bytes={Held.ACTIVATION: (10,), Held.WEIGHT_INPUTS: (4,)}
    )
    (row,) = rows_of("0F0 0F1 0I0 0I1 0F2 0W0 0W1 0B2")
    assert memory_curve(row, in_bytes(costs)) == [10, 20, 20, 14, 18, 18, 14, 10]


def test_messages_hold_nothing() -> None:
    with_messages = rows_of("0F0 0SEND_F0 0RECV_B0 0WAIT_F0 0B0")[0]
    passes = rows_of("0F0 0B0")[0]
    amount = in_bytes(
        Costs(PassCosts({F: (1,)}, held_bytes={Held.ACTIVATION: (3,), Held.WEIGHT_INPUTS: (2,)}))
    )
    assert memory_curve(with_messages, amount) == memory_curve(passes, amount) == [3, 3]


# --- costs that depend on the next action


def test_a_w_right_behind_its_i_saves_what_b_saves() -> None:
    costs = uniform(line(1), 1, 2, 2).with_passes(fused_backward_saving=(0.5,))
    problem = Problem(line(1), 2, costs)
    ends = {
        text: simulate_unproved(written(text, (0,)), problem).makespan
        for text in ("0F0 0I0 0W0 0F1 0I1 0W1", "0F0 0I0 0F1 0W0 0I1 0W1", "0F0 0B0 0F1 0B1")
    }
    assert list(ends.values()) == [9, 9.5, 9]
    assert lower_bound(problem, splits_backward=True) <= 9


# --- names


@pytest.mark.parametrize(
    ("alias", "name"), [("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b"), ("1f1b:", "1f1b")]
)
def test_aliases(alias: str, name: str) -> None:
    problem = line_problem(2, 3)
    assert choose(alias).build(problem) == choose(name).build(problem)
    assert choose(alias).spec == alias


def test_names_and_aliases_are_unique() -> None:
    names = [name for entry in entries().values() for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    assert all(entry.name == name for name, entry in entries().items())
    assert not any(":" in name or name.endswith(".csv") for name in names)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Register a family ``counting``, and return the list of the options that it is called with."""
    calls: list[dict[str, Any]] = []

    def build(
        problem: Problem, *, group: int = 2, slack: float = 0.5, mode: str = "a", extra: bool = True
    ) -> Schedule:
        calls.append({"group": group, "slack": slack, "mode": mode, "extra": extra})
        return choose("gpipe").build(problem)

    entry = FamilyEntry("counting", build, line, "nowhere")
    monkeypatch.setitem(registry.entries(), "counting", entry)
    return calls


DEFAULTS = {"group": 2, "slack": 0.5, "mode": "a", "extra": True}


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("counting", {}),
        ("counting:group=4", {"group": 4}),
        ("counting:slack=1e-3,group=3", {"group": 3, "slack": 1e-3}),
        ("counting:mode=b", {"mode": "b"}),
        ("counting:extra=false", {"extra": False}),
        ("counting:extra=true", {"extra": True}),
    ],
)
def test_options(spec: str, options: dict[str, Any], registered: list[dict[str, Any]]) -> None:
    choose(spec).build(line_problem(2, 2))
    assert registered == [DEFAULTS | options]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "counting:grup=4",
            "has no option 'grup'; did you mean group? Its options",
        ),
        ("counting:group=four", "group must be a whole number, not 'four'"),
        ("counting:group", "group must be a whole number, not ''"),
        ("counting:group=2.5", "group must be a whole number, not '2.5'"),
        ("counting:extra=no", "extra must be true or false, not 'no'"),
        ("counting:extra", "extra must be true or false, not ''"),
        ("counting:group=4,group=5", "group is given twice in 'group=4,group=5'; write group once"),
    ],
)
def test_bad_options(spec: str, message: str, registered: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError) as refusal:
        choose(spec)
    assert str(refusal.value).startswith("schedule counting")
    assert message in str(refusal.value)


def test_a_family_without_options_says_so() -> None:
    with pytest.raises(ValueError, match=r"schedule gpipe has no option 'x'; it has none"):
        choose("gpipe:x=1")


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError) as refusal:
        choose("zb-h9")
    message = str(refusal.value)
    assert message.startswith(
        "there is no schedule 'zb-h9'; did you mean zb-h1 or zb-h2? Known are "
    )
    assert all(name in message for name in entries())
    assert "or a .csv or .py file" in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("zbv", "zb-v"),
        ("ZB-V", "zb-v"),
        ("ZB_V", "zb-v"),
        ("zb-h11", "zb-h1"),
        ("Interleave", "interleaved"),
        ("schedule1f1b", "Schedule1F1B"),
        ("vauto:x=1", "v-auto"),
    ],
)
def test_the_error_for_a_misspelt_schedule_names_the_right_one(name: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"; did you mean {meant}\? Known are gpipe"):
        choose(name)


@pytest.mark.parametrize(
    "choose_it",
    [
        lambda: from_argv(["--pipeline-schedule", "ZB-V"]),
        lambda: from_environment({"MEGATRON_EXT_SCHEDULE": "ZB-V"}),
        lambda: megatron_ext.install(schedule="ZB-V"),
    ],
    ids=["flag", "variable", "install"],
)
def test_the_right_schedule_is_named_wherever_it_is_misspelt(
    choose_it: Callable[[], object],
) -> None:
    with pytest.raises(ValueError, match=r"no schedule 'ZB-V'; did you mean zb-v\?"):
        choose_it()


@pytest.mark.parametrize(
    "choose_it",
    [
        lambda: from_argv(["--pipeline-schedule", "zb-h1", "--pipeline-memory-limit", "x"]),
        lambda: from_environment(
            {"MEGATRON_EXT_SCHEDULE": "zb-h1", "MEGATRON_EXT_MEMORY_LIMIT": "x"}
        ),
        lambda: megatron_ext.install(schedule="zb-h1", memory_limit="x"),
    ],
    ids=["flag", "variable", "install"],
)
def test_a_limit_that_no_sizes_make_one_is_refused_at_once(choose_it: Callable[[], object]) -> None:
    """A memory limit that cannot be parsed is refused at once. ``install`` used to return a handle,
    and read the value only when it built the first step."""
    with pytest.raises(ValueError, match="memory limit 'x' is not understood"):
        choose_it()


def test_the_error_for_a_name_like_no_schedule_lists_all() -> None:
    with pytest.raises(ValueError, match="there is no schedule 'fastest'; known are gpipe, 1f1b"):
        choose("fastest")


def test_the_error_for_a_misspelt_option_names_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"no option 'vp'; did you mean vpp\? Its options are vpp"):
        choose("interleaved:vp=2")


def test_schedule_file_for_other_ranks(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n")
    assert choose(str(path)).place(2).rank_of == (0, 1)
    with pytest.raises(ValueError) as refusal:
        choose(str(path)).place(4)
    assert str(refusal.value) == (
        f"schedule file {path} is for 2 ranks, with a row for each, and the pipeline has 4"
    )


def test_schedule_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"schedule file .*none\.csv cannot be read: no such file"):
        choose(str(tmp_path / "none.csv"))


@pytest.mark.parametrize(("text", "splits"), [("0F0,0B0", False), ("0F0,0I0,0W0", True)])
def test_schedule_file_may_split_the_backward(text: str, splits: bool, tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text(text)
    assert choose(str(path)).traits.splits_backward is splits


@pytest.mark.parametrize("microbatches", [0, -1])
def test_a_step_without_microbatches(microbatches: int) -> None:
    with pytest.raises(ValueError, match=rf"microbatches is {microbatches}; write 1 or more"):
        line_problem(2, microbatches)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_pipeline_without_ranks(ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"ranks is {ranks}; write 1 or more"):
        line(ranks)


def test_costs_that_do_not_fit_on_the_disk_leave_the_file_before(tmp_path: Path) -> None:
    """If the disk is full, the earlier costs file stays as it was. Half a file used to be left,
    which the next run refused."""
    path = tmp_path / "costs.json"
    save_costs(uniform(LOOP, f=1, i=1, w=1), path)
    before = path.read_text()
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, usual[1]))
    try:
        with pytest.raises(OSError, match="large"):
            save_costs(uniform(LOOP, f=2, i=2, w=2), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert path.read_text() == before and [*tmp_path.iterdir()] == [path]


def test_costs_in_short() -> None:
    """The outline of costs is short. It used to repeat costs that are equal for all stages, and to
    print the costs of copies in runs that make none."""
    alike = parse_costs("f=10.0123,i=12,w=8,comm=1,d2h=6,h2d=6", LOOP)
    assert outline_costs(alike, LOOP, with_copies=False) == "f=10,i=12,w=8,comm=1"
    assert outline_costs(alike, LOOP, with_copies=True) == "f=10,i=12,w=8,d2h=6,h2d=6,comm=1"
    differing = parse_costs("f=1/2/3/5,i=12,w=8,output_layer=1/2/0", LOOP)
    assert (
        outline_costs(differing, LOOP, with_copies=True)
        == "f=4..7,i=12,w=8,comm=0,output_layer=1/2/0"
    )
