"""Fixtures of several files."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.ranks import Script


@pytest.fixture(scope="session")
def script() -> Iterator[Script]:
    """Imports torch and Megatron once for all tests that this worker runs."""
    script = Script()
    yield script
    script.close()
