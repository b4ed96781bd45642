"""Two ranks on one device, started by hand, over NCCL if it allows that.

python -m tests.gpu.one_gpu.two_ranks cuda|cpu trial
python -m tests.gpu.one_gpu.two_ranks cuda|cpu step SPEC async|batched

NCCL 2.30 and later let two ranks share a device (NCCL_MULTI_RANK_GPU_ENABLE). Without MPS they take
turns on it, so times mean nothing.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.schedule.problem import P2P
from tests.gpu.one_gpu.executor import tell_step
from tests.gpu.one_gpu.machine import nccl_version
from tests.gpu.one_gpu.rows import CannotRun, run_case, tell
from tests.gpu.one_gpu.runner import MISSING, last_words
from tests.gpu.small_stages import program_of
from tests.helpers.ranks import torchrun_environment

ROOT = Path(__file__).resolve().parents[3]
RANKS = 2
OLDEST_NCCL = (2, 30)
_GRACE = 5.0  # seconds that the other ranks have to end after one rank has failed
_DEADLINE = time.monotonic() + float(os.environ.get("ONE_GPU_SECONDS", "inf")) - _GRACE


class RankFailed(RuntimeError):
    """Raised with the last output of the first rank that failed, or of all ranks if they hang."""


def folder() -> Path:
    """Return the folder that the cases of a part share."""
    return Path(os.environ.get("ONE_GPU_FOLDER", tempfile.gettempdir()))


def run_ranks(
    ranks: int, words: tuple[str, ...], name: str, environment: Mapping[str, str]
) -> list[str]:
    """Return the outputs of ``ranks`` processes of ``python WORDS``, all on the first device.

    Raises:
        RankFailed: a rank has ended badly, and the others are ended with it; or all hang.
        CannotRun: a rank lacked a package.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder() / f"{name}.rank{rank}.log" for rank in range(ranks)]
    processes = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        for rank, log in enumerate(logs):
            with log.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-X", "faulthandler", "-u", *words],
                        cwd=ROOT,
                        env={
                            **os.environ,
                            **torchrun_environment(rank, ranks, store.port),
                            "LOCAL_RANK": "0",
                            "GLOO_SOCKET_IFNAME": "lo",
                            "NCCL_SOCKET_IFNAME": "lo",
                            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
                            "NCCL_MAX_CTAS": "8",
                            # All streams share one hardware queue, as Megatron requires for tensor
                            # parallelism.
                            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                            # The cache of compiled code is empty, so the first forward pass
                            # compiles.
                            "TORCHINDUCTOR_CACHE_DIR": cache,
                            **environment,
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        failed = _wait(processes)
    if failed:
        reason = "; ".join(f"rank {rank}: {last_words(logs[rank])}" for rank in failed)
        raise CannotRun(reason) if MISSING in reason else RankFailed(reason)
    return [log.read_text(errors="replace") for log in logs]


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all have ended, and return the first rank that failed, or all ranks if they
    hang."""
    failed: list[int] = []
    end = _DEADLINE
    while any(process.poll() is None for process in processes):
        if not failed:
            failed = [rank for rank, process in enumerate(processes) if process.poll()][:1]
            end = min(end, time.monotonic() + _GRACE) if failed else end
        if time.monotonic() > end:
            failed = failed or list(range(len(processes)))
            for process in processes:
                process.send_signal(signal.SIGABRT)  # at this signal Python prints where it is
            time.sleep(1)
            for process in processes:
                process.kill()
                process.wait()
        time.sleep(0.05)
    return failed or [rank for rank, process in enumerate(processes) if process.returncode][:1]


def backend(kind: str) -> str:
    return "nccl" if kind == "cuda" else "gloo"


def trial(kind: str) -> None:
    """Find out whether two ranks can communicate; `refusal` tells later cases."""
    verdict = folder() / "nccl"
    verdict.write_text("the trial did not end")
    try:
        if kind == "cuda":
            _check_version()
        words = ("-m", __spec__.name, kind, "rank")
        run_ranks(RANKS, words, "trial", {"NCCL_DEBUG": "WARN"})
    except (CannotRun, RankFailed) as reason:
        verdict.write_text(str(reason))
        raise CannotRun(str(reason)) from None
    verdict.write_text("")
    tell(f"two ranks on one device, {backend(kind)}: a sum and a message", "right")


def _check_version() -> None:
    version = nccl_version()
    if version[:2] < OLDEST_NCCL:
        words = ".".join(map(str, version))
        raise CannotRun(f"NCCL {words} takes one rank a device (2.30 and later take two)")


def trial_rank(kind: str) -> None:
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    dist.init_process_group(backend(kind), timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    total = torch.ones(2**20, device=device)
    dist.all_reduce(total)
    assert bool((total == RANKS).all()), total
    if rank == 0:
        dist.send(total * 3, 1)
    else:
        dist.recv(total, 0)
        assert bool((total == 3 * RANKS).all()), total
    dist.destroy_process_group()


def refusal() -> str:
    """Return why NCCL refuses two ranks on this device, as `trial` found, or an empty text."""
    verdict = folder() / "nccl"
    return verdict.read_text() if verdict.exists() else ""


def step(kind: str, spec: str, p2p: str) -> None:
    """Run a step of transport and executor whose first F compiles an activation
    (`tests.gpu.nccl_rank`)."""
    if refusal():
        raise CannotRun(refusal())
    with tempfile.TemporaryDirectory() as results:
        words = ("-m", "tests.gpu.nccl_rank", spec, p2p, kind, results)
        # Without caches the step compiles its code anew, although the measurement of held bytes has
        # compiled the same code.
        again = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        run_ranks(RANKS, words, f"step-{spec}-{p2p}", again)
        seen = [pickle.loads((Path(results) / str(rank)).read_bytes()) for rank in range(RANKS)]
    program = program_of(spec, RANKS, P2P(p2p))
    tell_step(f"transport, {spec}, {p2p}, two ranks, {backend(kind)}", seen, program, kind)


def main(kind: str, name: str, *words: str) -> None:
    if name == "rank":
        trial_rank(kind)
        return
    cases: dict[str, Callable[..., None]] = {"trial": trial, "step": step}
    run_case(" ".join(("two ranks", name, *words)), lambda: cases[name](kind, *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
