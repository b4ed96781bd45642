"""Tests of a race of schedules without a training: its candidates, its turns, its results, and its
texts."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.contestants import Contestants, RaceThen
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.compile.registry import choose
from megatron_ext.config import PipelineConfig
from megatron_ext.features.race.settings import contestants
from megatron_ext.race import race_texts
from megatron_ext.race.race_record import (
    NAME,
    RaceFigures,
    RaceRecord,
    first_difference,
    load_race_record,
    save_race_record,
)
from megatron_ext.race.rounds import ROUNDS, TIMED, WARM_UP, Race, ratio_of
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.problem import Problem
from megatron_ext.written_settings import from_environment

# ---- the candidates of a race


@pytest.mark.parametrize(
    ("schedule", "wanted", "expected"),
    [
        (None, "zb-h1 zb-1p", "1f1b zb-h1 zb-1p"),
        (None, "zb-h1 1f1b", "1f1b zb-h1"),
        ("zb-h1", "zb-1p", "1f1b zb-h1 zb-1p"),
        ("1f1b", "zb-1p", "1f1b zb-1p"),
        ("zb-h1", "zb-h1 gpipe", "1f1b zb-h1 gpipe"),
        (None, "interleaved-zb gis", "interleaved interleaved-zb gis"),
        (None, "interleaved-zb:vpp=3", "interleaved:vpp=3 interleaved-zb:vpp=3"),
        (None, "gis interleaved:group=4", "interleaved:group=4 gis"),
        (None, "zb-v v-half", "1f1b-v zb-v v-half"),
    ],
)
def test_the_baseline_is_the_plain_schedule_of_the_placement(
    schedule: str | None, wanted: str, expected: str
) -> None:
    assert str(contestants(schedule, wanted.split())) == expected


@pytest.mark.parametrize(
    ("baseline", "words"),
    [("1f1b", "stock's order"), ("interleaved:vpp=3", "stock's order"), ("1f1b-v", "no order of")],
)
def test_it_says_whether_the_baseline_is_stocks(baseline: str, words: str) -> None:
    assert Contestants((baseline, "x")).order_of_baseline.startswith(words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"race": "zb-h1 zb-v"},
            "--pipeline-race: zb-h1 has the placement line with 1 stage on a rank and zb-v has the "
            "placement v with 2 stages on a rank",
        ),
        ({"race": "zb-v", "schedule": "zb-h1"}, "race schedules that put each stage on"),
        ({"race": "gis gis:vpp=3"}, "loop with 2 stages on a rank and gis:vpp=3 has the placement"),
        ({"race": "1f1b"}, "1f1b is the schedule to compare others with"),
        ({"race": ""}, "names no schedule"),
        ({"race": "zb-h1 zb-h1"}, "zb-h1 is named twice"),
        ({"race": "zb-h3"}, "did you mean zb-h1"),
        ({"race": "zb-h1", "post_validation": True}, "steps that overlap cannot be timed"),
        (
            {"race_then": "report", "schedule": "zb-h1"},
            "and no race is requested; add --pipeline-race",
        ),
        ({"race_then": "report"}, "is given without --pipeline-schedule"),
        ({"race": "zb-h1", "race_then": "keep"}, "write winner or report"),
    ],
)
def test_what_cannot_race_is_refused_in_one_line(
    settings: dict[str, str | bool], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        PipelineConfig.parse(**settings)
    assert "\n" not in str(error.value)


def test_a_race_takes_the_place_of_a_schedule() -> None:
    config = PipelineConfig.parse(race="zb-h1 zb-1p", race_then="report")
    assert config.schedule == "1f1b" and str(config.race) == "1f1b zb-h1 zb-1p"
    assert config.race_then is RaceThen.REPORT
    assert [resolved.spec for resolved in config.resolved_specs] == ["1f1b", "zb-h1", "zb-1p"]
    assert config.splits_backward and not config.resolved_spec.traits.splits_backward
    assert from_environment({"MEGATRON_EXT_RACE": "zb-h1"}).schedule == "1f1b"


def test_a_plan_joins_its_race_when_it_is_made() -> None:
    assert PipelineConfig.parse(race="zb-h1", schedule="plan").schedule == "plan"


# ---- the turns of a race and their results


def drive(race: Race, seconds: dict[str, float], drift: float = 0.0) -> list[str]:
    """Run ``race`` to its end and return the schedule of each turn. Iterations take ``seconds``,
    and ``drift`` more in each turn."""
    turns: list[str] = []
    for number in itertools.count():
        if race.is_over:
            return turns
        turns.append(race.current)
        race.end_turn(seconds[race.current] * (1 + drift * number))
    raise AssertionError


def test_each_round_goes_there_and_back() -> None:
    race = Race("a", ["b", "c"])
    assert race.iterations_left == ROUNDS * 6 * (WARM_UP + TIMED)
    turns = drive(race, {"a": 1.0, "b": 0.9, "c": 0.8})
    assert turns == list("abccba") * ROUNDS
    assert race.iterations_left == 0
    assert race.winner == "c"
    assert race.current == "a"


def test_drift_cancels_out() -> None:
    """A steady drift of the machine does not change the ratio of two schedules in a race. Here each
    turn takes 1 % longer than the one before."""
    race = Race("a", ["b"])
    drive(race, {"a": 1.0, "b": 0.8}, drift=0.01)
    ratio = race.ratio("b")
    assert ratio is not None and ratio.median == pytest.approx(1.25, rel=1e-9)
    assert ratio.lower == pytest.approx(ratio.upper)


def test_who_is_slower_beyond_the_spread_is_dropped() -> None:
    race = Race("a", ["b", "c"])
    turns = drive(race, {"a": 1.0, "b": 1.03, "c": 0.9})
    assert turns == [*"abccba" * 2, *"acca" * (ROUNDS - 2)]
    assert race.dropped.keys() == {"b"} and "0.971 times as fast as a" in race.dropped["b"]
    assert race.winner == "c"
    only = Race("a", ["b"])
    assert drive(only, {"a": 1.0, "b": 1.03}) == list("abba") * 2
    assert only.winner == "a" and only.best == "b"


def test_who_cannot_be_built_any_more_does_not_win_by_rounds_of_an_earlier_start() -> None:
    race = Race("a", ["b", "c"])
    race.drop("b", "rank 0 has too little host memory")
    for _ in range(ROUNDS):
        race.add_round({"a": [1.0, 1.0], "b": [0.5, 0.5], "c": [0.9, 0.9]})
    assert race.is_over and race.winner == "c" and race.ratio("b") is None
    assert "race is over: c is 1.111 times as fast" in race_texts.winner_text(
        race, takes_winner=True
    )


def test_who_is_hardly_slower_stays() -> None:
    race = Race("a", ["b"])
    assert len(drive(race, {"a": 1.0, "b": 1.01})) == 4 * ROUNDS
    assert race.winner == "a" and not race.dropped


def test_a_gain_within_the_spread_is_none() -> None:
    race = Race("a", ["b"])
    for b in (0.9, 1.1, 0.95, 1.05, 0.99):
        race.add_round({"a": [1.0, 1.0], "b": [b, b]})
    ratio = race.ratio("b")
    assert ratio is not None and ratio.median > 1 > ratio.lower
    assert race.winner == "a"
    assert "no schedule is faster than a" in race_texts.winner_text(race, takes_winner=True)


def test_quartiles_leave_an_outlier_out() -> None:
    ratio = ratio_of([1.1, 1.11, 0.5, 1.12, 1.13])
    assert (ratio.lower, ratio.median, ratio.upper) == pytest.approx((1.1, 1.11, 1.12))


def test_no_candidate_is_left() -> None:
    race = Race("a", ["b"])
    race.drop("b", "it needs more memory")
    assert race.is_over and race.winner == "a" and race.best is None


@pytest.mark.parametrize(
    ("specs", "winner", "dropped"),
    [("1f1b zb-h1 zb-2p", "zb-2p", ()), ("1f1b-v zb-v v-min", "zb-v", ("v-min",))],
)
def test_on_simulated_clocks_the_known_winner_wins(
    specs: str, winner: str, dropped: tuple[str, ...]
) -> None:
    raced = contestants(None, specs.split())
    seconds = {}
    for resolved in raced.resolved_specs:
        placement = resolved.place(4)
        costs = parse_costs("f=10,i=14,w=6", placement)
        problem = Problem(placement, 8, costs)
        seconds[resolved.spec] = step_seconds(build_program(resolved, problem), costs)
    race = Race(raced.baseline, raced.candidates)
    drive(race, seconds)
    assert race.winner == winner
    assert tuple(race.dropped) == dropped


# ---- the record that the next start reads


def record() -> RaceRecord:
    figures = RaceFigures(0.1, 0.09, 2.0**30, None, 4.0)
    return RaceRecord({"GPU": "8 x H100"}, [{"a": [1.0, 1.1], "b": [0.9, 0.8]}], {"b": figures})


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "race.json"
    save_race_record(record(), path)
    assert load_race_record(path) == record()
    race = Race("a", ["b"])
    for measured in load_race_record(path).rounds:
        race.add_round(measured)
    ratio = race.ratio("b")
    assert ratio is not None and ratio.median == pytest.approx(2.1 / 1.7)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 3}', '{"version": 2, "new": 3}'])
def test_what_is_no_record_is_said(text: str, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"race\.json is not understood"):
        load_race_record(path)


@pytest.mark.parametrize("version", [0, 3])
def test_a_record_of_another_version_is_named(version: object, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    save_race_record(record(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    with pytest.raises(ValueError, match=rf"race record is {version}, and only 2 is known"):
        load_race_record(path)


def test_the_first_difference_is_named() -> None:
    assert first_difference({"a": "1"}, {"a": "1"}) == ""
    assert (
        first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"})
        == "b was 3 there and is 2 here"
    )


# ---- the texts of a race


def test_the_row_can_be_pasted() -> None:
    two = contestants(None, ["zb-h1"])
    race = Race(two.baseline, two.candidates)
    drive(race, {"1f1b": 1.0, "zb-h1": 0.8})
    figures = {"zb-h1": RaceFigures(0.11, 0.1, 3 * 2.0**30, 2.5 * 2**30, 4)}
    head, rule, row = race_texts.table(race, two, {"GPU": "8 x H100"}, figures).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    assert row == (
        "| 8 x H100 | 1f1b (stock's order) | zb-h1 | 1.250 (1.250 to 1.250) | 11.0% (10.0%) | "
        "3 GiB (2.5 GiB) |"
    )
    assert choose(race.winner).traits.splits_backward
    assert race_texts.winner_text(race, takes_winner=False).endswith(
        "the training goes on under 1f1b"
    )
    line = race_texts.figures_line("zb-h1", race, figures["zb-h1"])
    assert line == (
        "race, zb-h1: iteration 800 ms, bubble 11.0% (predicted 10.0%), peak 3 GiB (predicted "
        "2.5 GiB, 4 microbatches)"
    )


def test_a_race_without_an_estimate_predicts_no_bubble(tmp_path: Path) -> None:
    """A race of a model with sparse attention, of which there is no estimate, says so next to its
    bubble, also after a restart. It used to print the bubble of plain attention as predicted."""
    two = contestants(None, ["zb-h1"])
    race = Race(two.baseline, two.candidates)
    drive(race, {"1f1b": 1.0, "zb-h1": 0.8})
    figures = dict.fromkeys(("1f1b", "zb-h1"), RaceFigures(0.3, None, None, None, 4))
    line = race_texts.figures_line("zb-h1", race, figures["zb-h1"])
    assert line.startswith("race, zb-h1: iteration 800 ms, bubble 30.0% (no estimate), peak")
    row = race_texts.table(race, two, {}, figures).splitlines()[-1]
    assert "| 30.0% (no estimate) |" in row
    assert race_texts.doubt_of_winner(race, figures) is None
    record = RaceRecord({}, race.rounds, figures)
    save_race_record(record, tmp_path / NAME)
    assert load_race_record(tmp_path / NAME) == record


@pytest.mark.parametrize(
    ("candidate", "measured", "predicted", "says"),
    [
        (1 / 1.291, 0.138, 0.111, "(13.8% measured) would be 1.160 times"),
        (1 / 1.291, 0.3, 0.138, "(13.8% predicted) would be 1.160 times"),
        (1 / 1.15, 0.138, 0.138, None),
        (1 / 1.29, 0.3, 0.3, None),
        (1.0, 0.0, 0.0, None),
    ],
)
def test_more_than_the_bubble_can_give_is_said_to_be_noise(
    candidate: float, measured: float, predicted: float, says: str | None
) -> None:
    """A gain that exceeds what removing the whole bubble would give is called noise. A race on a
    busy machine used to choose a schedule that seemed 1.291 times as fast. That gain was larger
    than its spread, although removing the whole bubble would have made the step only 1.16 times as
    fast."""
    race = Race("1f1b", ["zb-h1"])
    drive(race, {"1f1b": 1.0, "zb-h1": candidate})
    figures = {name: RaceFigures(measured, predicted, None, None, 4) for name in ("1f1b", "zb-h1")}
    doubt = race_texts.doubt_of_winner(race, figures)
    if says is None:
        assert doubt is None
    else:
        assert doubt is not None and says in doubt
        assert "1.291 times as fast is noise" in doubt and "race again" in doubt


def test_a_race_without_a_winner_is_not_doubted() -> None:
    race = Race("1f1b", ["zb-h1"])
    drive(race, {"1f1b": 1.0, "zb-h1": 2.0})
    assert race_texts.doubt_of_winner(race, {"1f1b": RaceFigures(0.0, 0.0, None, None, 4)}) is None


def test_a_race_without_a_round_has_no_row() -> None:
    assert race_texts.table(Race("a", ["b"]), Contestants(("a", "b")), {}, {}) == ""


CONTESTANTS = Contestants(("a", "b", "c"))


def course(rounds: int) -> RaceRecord:
    """Return the record of a race of a, b and c after ``rounds`` rounds: c is dropped after two,
    and b wins."""
    race = Race("a", ["b", "c"])
    for number in range(rounds):
        seconds = {"a": 1.0 + number / 100, "b": 0.9, "c": 2.0}
        left = {spec: [seconds[spec], seconds[spec] + 0.01] for spec in ("a", *race.candidates)}
        race.add_round(left)
    figures = RaceFigures(0.2, 0.25, 3e9, None, 8.0)
    winner = race.winner if race.is_over else None
    facts = {"GPU": "8 x H100", "the race": "a b c"}
    return RaceRecord(facts, race.rounds, dict.fromkeys("abc", figures), winner)


@pytest.mark.parametrize("rounds", range(1, ROUNDS + 1))
def test_each_part_of_a_race_is_read_again(rounds: int, tmp_path: Path) -> None:
    record = course(rounds)
    save_race_record(record, tmp_path / NAME)
    assert load_race_record(tmp_path / NAME, CONTESTANTS) == record
    assert record.winner == ("b" if rounds == ROUNDS else None)


def test_a_race_that_none_could_run_is_read_again(tmp_path: Path) -> None:
    record = RaceRecord({"the race": "a b c"}, winner="a")
    save_race_record(record, tmp_path / NAME)
    assert load_race_record(tmp_path / NAME, CONTESTANTS) == record


def test_a_record_is_what_a_race_can_have_written(tmp_path: Path) -> None:
    """A race record is refused unless a race can have written it. Of 395 changed records, 120 used
    to be accepted: negative seconds won, and a winner that is no schedule ended each later start in
    a traceback."""
    values: list[Any] = [
        None,
        True,
        -1,
        -0.5,
        0,
        1e308,
        math.nan,
        math.inf,
        10**400,
        "",
        "zb-h9",
        [],
        {},
        [1],
    ]
    taken = []
    for rounds in (3, ROUNDS):
        save_race_record(course(rounds), tmp_path / NAME)
        whole = json.loads((tmp_path / NAME).read_text())
        for path in [*paths_in(whole)]:
            for value in [*values, *renamed(whole, path)]:
                data = changed(whole, path, value)
                (tmp_path / NAME).write_text(json.dumps(data))
                with contextlib.suppress(ValueError):
                    record = load_race_record(tmp_path / NAME, CONTESTANTS)
                    if record != course(rounds) and path[0] != "fingerprint":
                        taken.append((path, value))
    taken.remove((("rounds",), whole_rounds(2)))  # this is a valid earlier record of the same race
    for path, value in taken:  # only numbers for the report may have changed
        is_figure = path[0] == "figures" and len(path) == 3
        assert is_figure and (value is None or -1 <= value <= 1), (path, value)


def whole_rounds(count: int) -> list[Any]:
    return [dict(measured) for measured in course(count).rounds]


def paths_in(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in JSON data."""
    if path:
        yield path
    items: Any = {}
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    for key, value in items:
        yield from paths_in(value, (*path, key))


def renamed(data: Any, path: tuple[Any, ...]) -> list[Any]:
    """Return a list of a copy of the table or list at ``path`` without its last item. The returned
    list is empty if ``path`` leads to anything else."""
    for key in path:
        data = data[key]
    if isinstance(data, dict) and data:
        return [dict([*data.items()][:-1])]
    return [data[:-1]] if isinstance(data, list) and data else []


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data
