"""Readers of the contents of a page of timelines."""

import json
import re
from typing import Any


def data_in(text: str) -> dict[str, Any]:
    """Return the data of the page whose text is ``text``."""
    match = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data
