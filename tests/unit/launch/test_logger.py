"""Tests that our log lines reach stdout, whatever other code does to loggers that are not ours."""

from __future__ import annotations

import contextlib
import io
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_ext.base.logger import logger

LINE = "megatron_ext: the line\n"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Restore the settings of the root logger and of ours after each test."""
    root = logging.getLogger()
    kept = [(log, log.level, log.propagate, list(log.handlers)) for log in (root, logger)]
    yield
    logging.disable(logging.NOTSET)
    for log, level, propagate, handlers in kept:
        log.setLevel(level)
        log.propagate, log.handlers[:] = propagate, handlers


def nothing() -> None:
    pass


def as_megatron() -> None:
    """Set a log handler as Megatron's training does, and the level of --logging-level 40."""
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=logging.INFO)
    logging.getLogger().setLevel(logging.ERROR)


def disabled() -> None:
    logging.disable(logging.CRITICAL)


@pytest.mark.parametrize("configure", [nothing, as_megatron, disabled])
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_line_goes_to_stdout_once(
    configure: object, level: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(configure)
    configure()
    logger.log(level, "the line")
    assert capsys.readouterr() == (LINE, "")


def test_an_error_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logger.error("the line")
    assert capsys.readouterr() == ("", LINE)


def test_stdout_is_what_it_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our log lines go to sys.stdout as it is at that moment. The check of a launch command
    replaces stdout to capture Megatron's output, and must capture our lines too."""
    kept_back = io.StringIO()
    monkeypatch.setattr(sys, "stdout", kept_back)
    logger.info("the line")
    assert kept_back.getvalue() == LINE


def test_a_level_silences(capsys: pytest.CaptureFixture[str]) -> None:
    logger.setLevel(logging.WARNING)
    logger.info("the line")
    assert capsys.readouterr() == ("", "")


def test_they_can_be_redirected(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    logger.handlers[:] = [logging.StreamHandler(stream)]
    logger.info("the line")
    assert stream.getvalue() == "the line\n"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_a_training_goes_on_without_a_line_that_cannot_be_written(
    level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training continues if a log line cannot be written. If the log's disk was full, a line
    about measured costs used to end the training."""
    closed = io.StringIO()
    closed.close()
    with monkeypatch.context() as broken, open("/dev/full", "w") as full:
        for stream in (full, closed):
            broken.setattr(sys, "stdout", stream)
            broken.setattr(sys, "stderr", stream)
            logger.log(level, "a lost line")
        with contextlib.suppress(OSError):
            full.close()
    logger.log(level, "the line")
    assert "".join(capsys.readouterr()) == LINE


def test_what_was_set_before_the_import_stays() -> None:
    script = """
import logging, sys
ours = logging.getLogger("megatron_ext")
ours.addHandler(logging.StreamHandler(sys.stdout))
ours.setLevel(logging.WARNING)
import megatron_ext
ours.info("unseen")
ours.warning("seen")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("seen\n", "")
