"""Test of scripts/pretrain_gpt.py with a Megatron that was installed from its wheel."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from megatron.core.datasets import utils

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "pretrain_gpt.py"


def test_helpers_that_are_compiled_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script leaves compiled dataset helpers as they are. A run on a GPU used to end at its
    start, because Megatron ran make and its wheel has no Makefile. No test without a GPU had shown
    this."""
    monkeypatch.setattr(utils, "compile_helpers", utils.compile_helpers)
    with pytest.raises(SystemExit):
        utils.compile_helpers()
    runpy.run_path(str(SCRIPT), run_name="imported")["keep_compiled_helpers"]()
    utils.compile_helpers()
