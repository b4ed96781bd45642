"""Skips that are failures: all of them under ``--no-skips``, and at night those of tests that run
nowhere else.

A skipped test shows nothing. By day a machine may lack much of what the tests need. A nightly run
that skips the same tests would pass for years.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

import pytest

from tests.helpers.combinations import IS_NIGHT


@dataclass(frozen=True)
class AllowedSkip:
    """Reason of skips that are allowed at night.

    Attributes:
        reason: regular expression that matches the whole reason.
        shown_by: the place where these tests run.
    """

    reason: str
    shown_by: str


GPU_SUITE = "scripts/gpu_tests.sh, on GPUs"

ALLOWED_AT_NIGHT = (
    AllowedSkip(r"needs (a|two|four) GPUs?.*", GPU_SUITE),
    AllowedSkip(r"needs root: SLURM starts jobs as root", "root and SLURM: a CI runner"),
    AllowedSkip(r".* not installed: as root, tests/slurm/cluster.sh --install", "root and SLURM"),
    AllowedSkip(r"before Megatron 0\.20 .*", "Megatron 0.20: the nightly job with Megatron's main"),
    AllowedSkip(r"there is no browser here: .*", "a browser: a CI runner"),
    AllowedSkip(r"\S+ does not start here: .*", "a browser: a CI runner"),
    AllowedSkip(r"pyenv has no older Python here", "an older Python"),
    AllowedSkip(r"needs ptxas to assemble the kernel", "ptxas: CUDA's toolkit"),
    AllowedSkip(r"this torch has no NCCL", "torch for CUDA"),
    AllowedSkip(r"torch has no \w+", "a newer torch"),
    AllowedSkip(r"this system refuses batch scheduling", "a system that allows SCHED_BATCH"),
)


def is_allowed_at_night(reason: str) -> bool:
    return any(re.fullmatch(allowed.reason, reason, re.DOTALL) for allowed in ALLOWED_AT_NIGHT)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips", action="store_true", help="a skipped test fails, with its reason"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid_skip(report, collector.config)
    return report


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    assert isinstance(report.longrepr, tuple)
    reason = report.longrepr[2].removeprefix("Skipped: ")
    if config.getoption("no_skips", default=False):
        forbidden_by = "--no-skips forbids"
    elif IS_NIGHT and not is_allowed_at_night(reason):
        forbidden_by = "a night forbids (tests/helpers/skips.py lists the skips that it allows)"
    else:
        return
    report.outcome = "failed"
    report.longrepr = f"skipped, which {forbidden_by}: {reason}"
