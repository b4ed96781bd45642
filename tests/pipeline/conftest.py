"""Pytest fixtures shared by the test files of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.ranks import Script


@pytest.fixture(scope="session")
def script() -> Iterator[Script]:
    """A process that imports torch and Megatron once and forks the ranks of all tests of this
    worker."""
    script = Script()
    yield script
    script.close()
