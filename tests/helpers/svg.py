"""Readers of the contents of an SVG."""

import xml.etree.ElementTree as ElementTree


def texts_of(svg: str) -> list[str]:
    """Return the texts of ``svg``, in order."""
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [(text.text or "").strip() for text in texts]
