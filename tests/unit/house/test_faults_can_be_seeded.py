"""Tests that the faults in tests/faults.py can be seeded: the source lines that they change exist,
and so do the tests that must catch them."""

from __future__ import annotations

import re

import pytest

from tests.faults import FAULTS, ROOT, Fault


def test_each_has_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_can_be_seeded(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
    for test in fault.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), test
