"""A pytest plugin that writes the ``covers`` marks of the collected tests as JSON.

The list is written to the file that `markers.OUTPUT` names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks

from tests.helpers.covers.markers import OUTPUT


def pytest_collection_finish(session: pytest.Session) -> None:
    marks = [mark for item in session.items for mark in marks_of(item)]
    Path(os.environ[OUTPUT]).write_text(json.dumps(marks))


def marks_of(item: pytest.Item) -> Iterator[dict[str, Any]]:
    """Yield the ``covers`` marks of ``item`` as arguments of `markers.read_mark`."""
    for mark in item.iter_markers("covers"):
        yield {
            "test": item.nodeid,
            "words": mark.args,
            "settings": mark.kwargs,
            "needs_gpu": item.get_closest_marker("gpu") is not None,
            "is_skipped": evaluate_skip_marks(item) is not None,
        }
