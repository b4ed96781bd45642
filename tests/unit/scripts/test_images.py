"""Tests of the pictures of the documentation: they exist, are small, and are what the script
draws."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import draw_images
from tests.helpers.svg import texts_of

pytest.importorskip("matplotlib")

DOCS = Path(__file__).resolve().parents[3] / "docs"
IMAGES = DOCS / "images"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

Drawn = Callable[[str], Path]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """Return a function that draws a picture, once for all tests, and returns its file."""
    folder = tmp_path_factory.mktemp("images")

    def draw(name: str) -> Path:
        file = folder / f"{name}.svg"
        if not file.exists():
            draw_images.main([name, "--into", str(folder)])
        return file

    return draw


def test_the_script_draws_all_that_pages_show() -> None:
    shown = {
        name
        for page in (*DOCS.glob("*.md"), DOCS.parent / "README.md")
        for name in re.findall(r"\]\((?:docs/)?images/(.*?)\)", page.read_text())
    }
    drawn = {f"{name}.svg" for name in draw_images.pictures(Path("my_schedule.py"))}
    assert {path.name for path in IMAGES.iterdir()} == shown == drawn


@pytest.mark.parametrize("picture", sorted(IMAGES.iterdir()), ids=lambda path: path.name)
def test_a_picture_is_small(picture: Path) -> None:
    """A picture is small. Pictures used to have 100 kB each, and 120,000 lines together, as each
    digit was an outline and each pass a shape with its own style."""
    svg = picture.read_text()
    assert 2_000 < len(svg) < 40_000
    assert svg.count("<clipPath") <= 2, "only of panels whose lines go on beyond them"
    assert svg.count("clip-path=") < 25 and len(texts_of(svg)) > 10


@pytest.mark.parametrize("name", ["hanayo", "eager-1f1b", "bench"])
def test_a_picture_is_what_the_script_draws(name: str, drawn: Drawn) -> None:
    """A committed picture is what the script draws: the same words and shapes. Another version of
    matplotlib may move them a little."""
    now, kept = drawn(name).read_text(), (IMAGES / f"{name}.svg").read_text()
    assert texts_of(now) == texts_of(kept), f"run scripts/draw_images.py {name}"
    assert NUMBER.split(now) == NUMBER.split(kept)
    places = [[float(number) for number in NUMBER.findall(svg)] for svg in (now, kept)]
    assert places[0] == pytest.approx(places[1], abs=1)


def test_two_runs_write_the_same_bytes(drawn: Drawn, tmp_path: Path) -> None:
    draw_images.main(["hanayo", "--into", str(tmp_path)])
    assert (tmp_path / "hanayo.svg").read_bytes() == drawn("hanayo").read_bytes()


def test_an_unknown_picture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        draw_images.main(["mona-lisa"])
    assert "no pictures: mona-lisa; there are gpipe, " in capsys.readouterr().err
