"""Tests of scripts/slurm/pretrain.sh on a real SLURM, with two nodes that are both this machine.

They need root and SLURM's daemons, which `tests/slurm/cluster.sh --install` installs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from scripts import quickstart
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.megatron_runs import losses, train
from tests.helpers.ranks import HANGS

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "tests" / "slurm" / "cluster.sh"
PRETRAIN = ROOT / "scripts" / "slurm" / "pretrain.sh"
RECORDED = ROOT / "tests" / "slurm" / "recorded.py"

RANKS = 4 if IS_NIGHT else 2  # number of ranks, on two nodes
SAVE_INTERVAL = 4
FLAGS = quickstart.MODEL | {
    "--pipeline-schedule": "zb-v",
    "--pipeline-model-parallel-size": str(RANKS),
    "--global-batch-size": "8",
    "--train-iters": "20",
    "--eval-iters": "0",
    "--num-workers": "1",  # data-loader workers of each rank; SLURM sends them its signals, too
}
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

MISSING = [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name)]

pytestmark = [
    pytest.mark.timeout(1800),  # `Job.wait_until` has a shorter limit, and prints more
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: SLURM starts jobs as root"),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"{', '.join(MISSING)} not installed: as root, tests/slurm/cluster.sh --install",
    ),
]


@dataclass(frozen=True)
class Cluster:
    """A running SLURM; its files are in ``folder``."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str) -> str:
        """Return the output of one of SLURM's commands; fail if the command fails."""
        ended = subprocess.run(
            words, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=HANGS
        )
        assert ended.returncode == 0, f"{words}: {ended.stderr}"
        return ended.stdout.strip()

    def processes(self) -> list[str]:
        """Return the command lines of SLURM's processes, including daemons."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        lines = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    lines.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:  # the process has ended since the folder was listed
                continue
        return lines


@dataclass(frozen=True)
class Job:
    """A training that was submitted."""

    cluster: Cluster
    number: str
    log: Path

    @property
    def state(self) -> str:
        line = ("squeue", "--noheader", "--states", "all", "--format", "%T", "--job", self.number)
        return self.cluster.run(*line)

    def losses(self) -> list[tuple[int, str]]:
        """Return each trained iteration, in the order of the log, with its loss to the last bit."""
        text = self.log.read_text() if self.log.exists() else ""
        matches = re.findall(r"^loss of iteration (\d+): (\S+)$", text, re.MULTILINE)
        return [(int(iteration), loss) for iteration, loss in matches]

    def resumed_at(self) -> list[int]:
        """Return the iterations of the checkpoints that later starts of the job have loaded."""
        text = self.log.read_text()
        return [int(at) for at in re.findall(r"successfully loaded .* at iteration (\d+)", text)]

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """Wait until ``happened`` returns True. Fail if the job ends before that, or hangs."""
        end = time.monotonic() + HANGS
        while not happened():
            if self.state in ENDED or time.monotonic() > end:
                if happened():
                    return
                pytest.fail(f"not {what}:\n{self.report()}", pytrace=False)
            time.sleep(0.2)

    def report(self) -> str:
        logs = {self.log: 60, self.cluster.folder / "slurmctld.log": 20}
        return "\n".join(
            [
                self.cluster.run("scontrol", "show", "job", self.number),
                self.cluster.run("sinfo", "--Node", "--long"),
                *(
                    f"--- {path}\n" + "\n".join(path.read_text().splitlines()[-lines:])
                    for path, lines in logs.items()
                    if path.exists()
                ),
            ]
        )


def submit(cluster: Cluster, folder: Path) -> Job:
    """Submit a training on two nodes, with equally many ranks on each."""
    settings = {"SCRIPT": str(RECORDED), "CHECKPOINTS": str(folder / "checkpoints")}
    number = replace(cluster, environment=cluster.environment | settings).run(
        *("sbatch", "--parsable", "--nodes", "2", "--gpus-per-node", str(RANKS // 2)),
        *("--output", str(folder / "log"), str(PRETRAIN)),
        *(word for pair in FLAGS.items() for word in pair),
        *("--save-interval", str(SAVE_INTERVAL)),
    )
    return Job(cluster, number, folder / "log")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Start SLURM for a test, and fail the test if any of its processes outlives it."""
    folder = tmp_path / "cluster"
    outside = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    environment = outside | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        # the folder of this Python has torchrun
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        # One thread, as torchrun sets it for several ranks on a node: sums then have a fixed order.
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # ranks train on the CPU, also if there are GPUs
    }
    running = Cluster(folder, environment)
    # SLURM runs as long as `cat`, which echoes a line as soon as SLURM is up.
    with subprocess.Popen(
        [CLUSTER, "cat"],
        env={**outside, "CLUSTER": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write("up\n")
        process.stdin.flush()
        assert process.stdout.readline() == "up\n", process.stderr.read()
        yield running
        process.stdin.close()
        process.wait(timeout=HANGS)
    assert process.returncode == 0
    assert not running.processes(), "these have outlived the cluster"


def test_requeued_in_the_middle_and_the_losses_of_a_run_that_never_stopped(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A job that is requeued in the middle has the losses of a run that never stopped.

    The job saves and requeues itself when SLURM signals that its time is up; the test sends the
    same signal. At night the job is also requeued from outside, and resumes from its last periodic
    checkpoint.
    """
    quickstart.RUNS.mkdir(parents=True, exist_ok=True)
    quickstart.prepare_text()
    job = submit(cluster, tmp_path)
    job.wait_until(lambda: len(job.losses()) > SAVE_INTERVAL + 1, "past its first checkpoint")
    if IS_NIGHT:
        cluster.run("scontrol", "requeue", job.number)
        job.wait_until(lambda: len(job.resumed_at()) == 1, "started again")
        before = len(job.losses())
        job.wait_until(lambda: len(job.losses()) > before, "training again")
    starts = len(job.resumed_at()) + 1
    cluster.run("scancel", "--batch", "--signal", "USR1", job.number)
    job.wait_until(lambda: len(job.resumed_at()) == starts, "started again after a signal")
    job.wait_until(lambda: job.state == "COMPLETED", "completed")

    assert "out of time: saving" in job.log.read_text()
    assert min(job.resumed_at()) >= SAVE_INTERVAL
    assert job.resumed_at() == sorted(set(job.resumed_at()))
    runs = train(RANKS, [word for pair in FLAGS.items() for word in pair])
    whole = {iteration: loss.hex() for iteration, loss in enumerate(losses(runs), start=1)}
    assert dict(job.losses()) == whole, "it has other losses than a run that never stopped"
    assert set(job.losses()) == {*whole.items()}, "what was trained twice has two losses"
