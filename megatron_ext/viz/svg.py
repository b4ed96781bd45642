"""SVG files of figures: small, with text as text, and the same bytes in every run.

The pictures of the documentation are committed, and should change only when what they show does.
matplotlib writes metadata, ids and styles that nothing needs; they are removed, and paths are
rounded to what can be seen.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from megatron_ext.base.text_file import whole_file, write_text_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)
GROUP, PATH, TEXT, USE = (f"{{{SVG}}}{name}" for name in ("g", "path", "text", "use"))
METADATA, HREF = f"{{{SVG}}}metadata", f"{{{XLINK}}}href"

# Texts are placed by the widths of DejaVu Sans, a font that matplotlib brings. A machine without it
# shows Verdana, which is about as wide.
FONTS = ("DejaVu Sans", "Verdana")
FAMILY = ", ".join((*(f"'{font}'" for font in FONTS), "sans-serif"))


def save(figure: Figure, path: Path) -> None:
    """Write ``figure`` as SVG or PNG, by the suffix of ``path``."""
    import matplotlib

    with matplotlib.rc_context(
        {
            "font.sans-serif": FONTS,
            "svg.fonttype": "none",
            "svg.hashsalt": "megatron_ext",  # otherwise ids of hatch patterns are random
        }
    ):
        if path.suffix == ".png":
            with whole_file(path) as begun:
                figure.savefig(begun, format="png", dpi=150)
            return
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    write_text_file(path, minified(written.getvalue()))


def minified(svg: str) -> str:
    """Return matplotlib's ``svg`` shortened, with numbers rounded to a tenth of a point.

    There is one element a line. Comments, metadata, ids of groups, groups without attributes and
    repeated styles are removed.
    """
    root = ElementTree.fromstring(svg)  # parsing drops comments
    for metadata in root.findall(METADATA):
        root.remove(metadata)
    markers = {f"#{path.get('id')}": path.get("style", "") for path in root.iter(PATH)}
    for element in root.iter():
        _shorten(element)
        if element.tag == TEXT:
            _drop_style(element, f"font-family: {FAMILY}")
        elif element.tag == USE:
            _drop_style(element, markers.get(element.get(HREF, ""), ""))
    root.set("font-family", FAMILY)
    _dissolve_groups(root)
    for parent in (root, *root.iter(GROUP)):
        _group_texts(parent)
    _break_lines(root)
    return ElementTree.tostring(root, encoding="unicode")


def shortened_path(path: str) -> str:
    """Return an SVG path of M, L, C, Q and z rounded to a tenth of a point.

    Lines along the axes become H and V.
    """
    commands = []
    x = y = ""
    for command, numbers in re.findall(r"([MLCQz])([^MLCQz]*)", path):
        places = [_tenths(number) for number in numbers.split()]
        if command == "L" and places[1] == y:
            commands.append(f"H{places[0]}")
        elif command == "L" and places[0] == x:
            commands.append(f"V{places[1]}")
        else:
            commands.append(command + " ".join(places))
        if places:
            x, y = places[-2:]
    return "".join(commands)


def _tenths(number: str) -> str:
    return f"{round(float(number), 1) + 0.0:g}"  # adding 0.0 turns -0 into 0


def _shorten(element: Element) -> None:
    """Shorten the attributes of the SVG ``element`` itself."""
    if element.tag == GROUP:
        element.attrib.pop("id", None)  # nothing refers to the id of a group
    for name in element.attrib.keys() & {"x", "y"}:
        element.set(name, _tenths(element.attrib[name]))
    if "d" in element.attrib:
        element.set("d", shortened_path(element.attrib["d"]))
    if "transform" in element.attrib:
        transform = element.attrib.pop("transform")
        # A rotation by an angle of 0 is dropped.
        if not transform.startswith("rotate(-0 "):
            element.set("transform", re.sub(r"-?\d+\.\d+", lambda n: _tenths(n[0]), transform))


def _drop_style(element: Element, inherited: str) -> None:
    """Remove those style declarations of ``element`` that are among the ``inherited`` ones."""
    style = element.attrib.pop("style", "").split("; ")
    kept = [declaration for declaration in style if declaration not in inherited.split("; ")]
    if any(kept):
        element.set("style", "; ".join(kept))


def _dissolve_groups(parent: Element) -> None:
    """Replace SVG groups without attributes by their members."""
    children: list[Element] = []
    for child in parent:
        _dissolve_groups(child)
        children += child if child.tag == GROUP and not child.attrib else [child]
    parent[:] = children


def _group_texts(parent: Element) -> None:
    """Write the style of adjacent SVG texts only once."""
    children: list[Element] = []
    for style, members in groupby(parent, _style_of_text):
        run = list(members)
        if style and len(run) > 1:
            group = Element(GROUP, style=style)
            for text in run:
                del text.attrib["style"]
            group.extend(run)
            run = [group]
        children += run
    parent[:] = children


def _style_of_text(element: Element) -> str:
    return element.get("style", "") if element.tag == TEXT else ""


def _break_lines(parent: Element) -> None:
    """Put every SVG element on a line of its own.

    Elements with children have no text in these files.
    """
    parent.tail = "\n"
    if len(parent):
        parent.text = "\n"
    for child in parent:
        _break_lines(child)
