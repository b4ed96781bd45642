"""Tests that our shortened SVG files show what matplotlib's show."""

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_ext.viz.svg import FAMILY, minified, save, shortened_path


@pytest.mark.parametrize(
    ("path", "shorter"),
    [
        (
            "M 41.904 22.08 \nL 64.45 22.08 \nL 64.45 46.5 \nL 41.9 46.5 \nz\n",
            "M41.9 22.1H64.5V46.5H41.9z",
        ),
        ("M 0 0 \nL 10 10.04 \nL 20 10.01 \n", "M0 0L10 10H20"),
        ("M 1 1 \nL 1.02 1.01 \nL 5 1 \n", "M1 1H1H5"),
        ("M 0 3 \nC 0.79 3 1.55 2.68 2.1 2.1 \nL 2.1 5 \n", "M0 3C0.8 3 1.6 2.7 2.1 2.1V5"),
        ("M 0 0 \nL 1 0 \nz\nM 5 0 \nL 5 4 \nz\n", "M0 0H1zM5 0V4z"),
        ("M 5 5 \nQ 6 6 7 5 \nL 8 5", "M5 5Q6 6 7 5H8"),
        ("M -0.04 -3.5 \nL 1234.56 1e-05", "M0 -3.5L1234.6 0"),
    ],
)
def test_a_path(path: str, shorter: str) -> None:
    assert shortened_path(path) == shorter


def drawn(content: str) -> str:
    """Return the part of a shortened SVG picture that corresponds to ``content``."""
    svg = minified(
        '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink"><metadata>today</metadata>{content}</svg>'
    )
    return svg.split("\n", 1)[1].removesuffix("</svg>\n")


@pytest.mark.parametrize(
    ("content", "less"),
    [
        ("<!-- a pass --><g id='patch_1'>\n <g id='a'/>\n<rect/></g>", "<rect />\n"),
        (
            "<g id='a'><g clip-path='url(#p)'><rect/></g></g>",
            '<g clip-path="url(#p)">\n<rect />\n</g>\n',
        ),
        ("<text x='1.234' transform='rotate(-0 1.2 3)'>F  7</text>", '<text x="1.2">F  7</text>\n'),
        (
            "<text y='-0.01' transform='rotate(-90 1.26 30)'>7</text>",
            '<text y="0" transform="rotate(-90 1.3 30)">7</text>\n',
        ),
        (
            f'<text style="font-size: 7px; font-family: {FAMILY}">7</text>',
            '<text style="font-size: 7px">7</text>\n',
        ),
        (
            "<g id='a'><text style='a: 1'>1</text></g><g id='b'><text style='a: 1'>2</text></g>"
            "<text style='a: 2'>3</text><rect style='a: 2'/><rect style='a: 2'/>",
            '<g style="a: 1">\n<text>1</text>\n<text>2</text>\n</g>\n<text style="a: 2">3</text>\n'
            '<rect style="a: 2" />\n<rect style="a: 2" />\n',
        ),
        (
            "<defs><path id='m' style='stroke: red; stroke-width: 1'/></defs>"
            "<use xlink:href='#m' x='3.14159' style='fill: red; stroke: red; stroke-width: 1'/>",
            '<defs>\n<path id="m" style="stroke: red; stroke-width: 1" />\n</defs>\n'
            '<use xlink:href="#m" x="3.1" style="fill: red" />\n',
        ),
    ],
)
def test_what_goes(content: str, less: str) -> None:
    svg = minified(
        '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink"><metadata>today</metadata>{content}</svg>'
    )
    assert svg.split("\n", 1)[1] == less + "</svg>\n"


def test_nothing_that_is_seen_goes(tmp_path: Path) -> None:
    """Shortening an SVG loses nothing visible: all shapes, markers and texts of a figure remain, in
    order and in place."""
    figure = pytest.importorskip("matplotlib.figure").Figure(layout="constrained")
    matplotlib = pytest.importorskip("matplotlib")
    axes = figure.subplots()
    axes.bar([0, 1], [2, 3], hatch="///", edgecolor="white")
    axes.plot([0, 1, 2], [1, 3, 1], "o--", label="line")
    axes.scatter([0, 1], [1, 2], marker="v", c=["red", "blue"])
    axes.set_ylabel("two\nlines")
    axes.set_title("rank 0 & 1")
    axes.legend()
    save(figure, tmp_path / "picture.svg")
    whole = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(whole, format="svg")
    kept, all_of_it = (
        leaves(svg) for svg in ((tmp_path / "picture.svg").read_text(), whole.getvalue())
    )
    assert [leaf[0] for leaf in kept] == [leaf[0] for leaf in all_of_it]
    for leaf, same in zip(kept, all_of_it, strict=True):
        assert leaf[1:] == pytest.approx(same[1:], abs=0.051)


def leaves(svg: str) -> list[tuple[str, float, float]]:
    """Return the shapes, markers and texts of ``svg`` with their positions (0 if they have
    none)."""
    return [
        (
            f"{element.tag} {element.text or ''}".strip(),
            float(element.get("x", "0")),
            float(element.get("y", "0")),
        )
        for element in ElementTree.fromstring(svg).iter()
        if element.tag.split("}")[1] in ("path", "use", "text", "rect")
    ]


def test_png_stays_matplotlibs(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1))
    save(figure, tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert [int.from_bytes(data[n : n + 4]) for n in (16, 20)] == [300, 150]
