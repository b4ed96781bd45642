"""Tests of the processes of rehearsed ranks: whether CUDA was used before a fork, and how a rank
fails."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.rehearsal import processes, server
from megatron_ext.rehearsal.gpu_here import gpu_here
from megatron_ext.rehearsal.processes import RankProcesses
from megatron_ext.rehearsal.request import FAILURE, RankRequest, save_request


def test_an_open_device_is_a_use_of_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open NVIDIA device counts as a use of CUDA. A library may use the driver without torch,
    and forked ranks then used to end in CUDA errors."""
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    )
    (tmp_path / "0").symlink_to("/dev/null")
    assert server.cuda_use(tmp_path) == ""
    (tmp_path / "7").symlink_to("/dev/nvidiactl")
    assert server.cuda_use(tmp_path) == "/dev/nvidiactl is open"
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: 0)
    monkeypatch.setattr(server.ctypes, "CDLL", lambda name: driver)
    assert server.cuda_use(tmp_path) == "/dev/nvidiactl is open"


def test_nvml_is_no_use_of_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML is no use of CUDA, although it opens the same devices.

    Megatron calls torch.cuda.is_available when it is imported. This used to initialise the driver,
    so that each rank had to start as a new process; torch is now told to use NVML instead.
    """
    driver = SimpleNamespace(cuDeviceGetCount=lambda count: 3)
    monkeypatch.setattr(server.ctypes, "CDLL", lambda name: driver)
    (tmp_path / "7").symlink_to("/dev/nvidiactl")
    assert server.cuda_use(tmp_path) == ""


def test_torch_says_that_it_has_started_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    )
    assert server.cuda_use() == "torch has started CUDA"


class _Server:
    """Server of ranks that answers with ``lines``."""

    def __init__(self, lines: list[str]) -> None:
        self.stdout = SimpleNamespace(readline=lambda: lines.pop(0), close=lambda: None)
        self.stdin = SimpleNamespace(
            write=lambda text: None, flush=lambda: None, close=lambda: None
        )

    def wait(self, timeout: float | None = None) -> int:
        return 3


def run(lines: list[str]) -> RankProcesses:
    made: Any = _Server(lines)
    return RankProcesses(made, {})


def test_a_rank_starts_anew_if_cuda_was_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []

    def run_in_process(path: Path, environment: object) -> int:
        started.append(path)
        return 1

    monkeypatch.setattr(processes, "_run_in_process", run_in_process)
    ranks = run(['{"used_cuda": "/dev/nvidia0 is open"}\n'])
    request = RankRequest(2, 4, "pretrain_gpt.py", (), tmp_path)
    with pytest.raises(ValueError, match="rank 2: ended with status 1 and no record"):
        ranks(request)
    assert started == [tmp_path / "request.json"]


def test_a_failed_rank_is_one_line(tmp_path: Path) -> None:
    ranks = run(['{"used_cuda": ""}\n', '{"status": 1}\n'])
    request = RankRequest(2, 4, "pretrain_gpt.py", (), tmp_path)
    save_request(request)

    def fail(text: str) -> None:
        (tmp_path / FAILURE).write_text("RehearsalError: rank 2, in step 3: out of memory\n")

    ranks._server.stdin.write = fail  # type: ignore[union-attr,method-assign]
    with pytest.raises(ValueError, match="rank 2: RehearsalError: rank 2, in step 3") as error:
        ranks(request)
    assert str(tmp_path / "log.txt") in str(error.value)


def test_a_server_that_ends_is_an_error() -> None:
    with pytest.raises(ValueError, match="has ended with status 3"):
        run([""])


def test_no_gpu_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_here() is None
