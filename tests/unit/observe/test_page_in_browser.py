"""Tests of the HTML page of timelines in a browser: it draws its data, and reacts to the pointer
and keys.

A Chromium without a window opens the page and a probe (tests/helpers/page_probe.js) that moves the
pointer, presses keys and looks at pixels. The probe writes its findings into the page's text.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.schedule.problem import Offload
from megatron_ext.viz.page.boxes import TrackGroup, before
from megatron_ext.viz.page.run import Run, simulated_run
from megatron_ext.viz.page.write import Page, data_of, text_of
from tests.helpers.combinations import nightly
from tests.unit.observe.test_page import label, program_of

PROBE = Path(__file__).parents[2] / "helpers" / "page_probe.js"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LISTEN = """<script>
window.pageErrors = [];
addEventListener("error", (event) => pageErrors.push(event.message));
addEventListener("securitypolicyviolation", (event) => pageErrors.push(event.blockedURI));
</script>"""

pytestmark = nightly("test_page shows by day what the page is drawn from")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> partial[str]:
    """Return a function that opens a file in the browser, and returns its text once its scripts are
    done."""
    found_at = next(filter(None, map(shutil.which, NAMES)), None)
    if found_at is None:
        pytest.skip(f"there is no browser here: {', '.join(NAMES)}")
    opens = partial(dump, found_at, tmp_path_factory.mktemp("profile"))
    try:
        opens("about:blank")
    except subprocess.SubprocessError as error:
        pytest.skip(f"{found_at} does not start here: {error}")
    return opens


def dump(browser: str, profile: Path, address: str) -> str:
    ended = subprocess.run(
        [
            *(browser, "--headless", "--disable-gpu", "--window-size=1400,1000"),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            *(f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom", address),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return ended.stdout


def runs() -> tuple[Run, ...]:
    return (
        simulated_run("1f1b", program_of("1f1b")),
        simulated_run("zb-v", program_of("zb-v", activation_offload=Offload.FULL)),
    )


def probed(opens: partial[str], page: Page, folder: Path) -> dict[str, Any]:
    """Open ``page`` with the probe, and return the probe's findings."""
    text = text_of(page).replace("<head>", f"<head>{LISTEN}")
    path = folder / "page.html"
    path.write_text(f'{text}<script type="module">{PROBE.read_text()}</script>')
    match = re.search(r'<pre id="probe">(.*?)</pre>', opens(path.as_uri()), re.DOTALL)
    assert match, "the probe has not ended"
    told: dict[str, Any] = json.loads(html.unescape(match[1]))
    assert told["errors"] == []
    return told


@pytest.fixture(scope="module")
def told(browser: partial[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("page")
    return probed(browser, Page("two schedules", runs(), "megatron-ext simulate"), folder)


def rgb(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


def is_close(colour: list[int], other: list[int]) -> bool:
    return max(abs(a - b) for a, b in zip(colour, other, strict=True)) <= 3


def test_every_pass_has_its_colour_in_its_place(told: dict[str, Any]) -> None:
    data = data_of(Page("x", runs(), ""))
    for run, shown, colours in zip(runs(), data["runs"], told["colours"], strict=True):
        passes = [n for n, box in enumerate(run.boxes) if box.track.group is TrackGroup.PASSES]
        assert [box for box, _ in colours] == passes
        white = hatched = 0
        for box, colour in colours:
            wanted = rgb(data["kinds"][shown["kind"][box]]["colour"])
            if run.chunk_of[run.boxes[box].stage]:  # white lines of hatching may cover the pixel
                hatched += 1
                white += not is_close(colour, wanted)
            else:
                assert is_close(colour, wanted), label(run.boxes[box])
        assert white < hatched or not hatched
    assert told["drawn"] >= sum(len(colours) for colours in told["colours"])


def test_figures_are_text(told: dict[str, Any]) -> None:
    for run in runs():
        assert f"{100 * run.figures.bubble_share_makespan:.1f} %" in told["text"]
        assert f"{run.figures.makespan:g}" in told["text"]


def test_a_pass_shows_what_it_waited_for(told: dict[str, Any]) -> None:
    run = runs()[1]
    box, said = told["hovered"]["box"], " ".join(told["hovered"]["tip"])
    assert said.startswith(label(run.boxes[box]))
    assert f"from {run.boxes[box].start:g} to {run.boxes[box].end:g}" in said
    for other in before(run.boxes, box):
        assert f"{label(run.boxes[other])} of rank {run.boxes[other].track.rank}, until" in said
    assert told["next"] == box + 1 and told["letGo"] is None
    latest = max(before(run.boxes, box), key=lambda other: run.boxes[other].end)
    assert told["waitedFor"] == latest


def test_the_curves_of_memory_are_in_their_order(told: dict[str, Any]) -> None:
    """The memory curves of the ranks lie behind each other in order: a pointer that comes from
    above first meets the rank that stores most."""
    peak, held = told["curves"]
    assert peak == max(runs()[1].figures.peaks)
    assert held[0] == peak and held == sorted(held, reverse=True)


def test_it_zooms_and_pans(told: dict[str, Any]) -> None:
    longest = max(run.length for run in runs())
    whole = {"from": 0, "to": longest}
    assert told["whole"] == whole
    width = told["zoomed"]["to"] - told["zoomed"]["from"]
    assert width == pytest.approx(longest / 1.5)
    assert told["panned"]["from"] == pytest.approx(told["zoomed"]["from"] + width / 10)
    assert told["panned"]["to"] - told["panned"]["from"] == pytest.approx(width)
    wheeled = told["wheeled"]
    assert wheeled["to"] - wheeled["from"] < 0.5 * longest
    assert wheeled["before"] == pytest.approx(wheeled["after"], abs=1), "what is pointed at stays"
    assert told["dragged"]["from"] > wheeled["from"]


def test_messages_fold_away_and_the_critical_path_stands_out(told: dict[str, Any]) -> None:
    assert all(open > shut for open, shut in zip(told["unfolded"], told["folded"], strict=True))
    run, plain = runs()[1], dict(map(tuple, told["colours"][1]))
    assert told["critical"]["path"] == list(run.critical)
    for box, colour in told["critical"]["colours"]:
        if box not in run.critical and not run.chunk_of[run.boxes[box].stage]:
            assert sum(colour) > sum(plain[box]), "what is not on the path is paler"


def test_light_and_dark(told: dict[str, Any]) -> None:
    assert told["light"] == "rgb(255, 255, 255)" and told["dark"] == "rgb(22, 24, 28)"
    for (box, light), (other, dark) in zip(told["colours"][1], told["darkColours"], strict=True):
        assert box == other and is_close(light, dark), "passes have the same colours"


def test_a_schedule_is_closed_and_the_axis_is_the_others(told: dict[str, Any]) -> None:
    assert told["closed"] == {"hidden": [True, False], "from": 0, "to": runs()[1].length}


def test_20_000_passes(browser: partial[str], tmp_path: Path) -> None:
    many = tuple(simulated_run(name, program_of(name, 16, 200)) for name in ("1f1b", "zb-h1"))
    seen = probed(browser, Page("many", many, ""), tmp_path)
    print(f"a picture of {seen['drawn']:,} boxes takes {seen['milliseconds']:.0f} ms here")
    assert seen["drawn"] > 5_000
