"""CUDA graphs of whole iterations of one rank of two. The other rank does not run: a rehearsal's
stand-in takes its place.

python -m tests.gpu.one_gpu.whole_iterations cuda|cpu eager SPEC
python -m tests.gpu.one_gpu.whole_iterations cuda|cpu graph SPEC

The rank trains through Megatron's own loop and its `FullCudaGraphWrapper`. After each step its
weights must have the bits that they have without a graph. Our refusal of such graphs is lifted
here, and only here; the refusal will be removed once this has run on a GPU. On the CPU the graph is
`helpers/whole_graphs`'.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.adapter.parity.digest import bits_of
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.script import launch
from megatron_ext.patches.engine import apply
from megatron_ext.patches.megatron.training.training import rehearsal
from megatron_ext.rehearsal.message_times import MessageTimes
from megatron_ext.rehearsal.rehearsed_peers import rehearsed_peers
from megatron_ext.rehearsal.values import Values
from megatron_ext.runtime.messages.peers import rehearse_with
from tests.gpu.one_gpu.gpt import flags, layer_flags
from tests.gpu.one_gpu.rows import CannotRun, run_case, tell
from tests.gpu.one_gpu.two_ranks import ROOT, folder
from tests.helpers import whole_graphs

REPLAYS = 10
# Number of steps. The first one warms up; the step of the capture runs nothing, and ends with a
# replay.
STEPS = 1 + REPLAYS
RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
STORE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # no process listens on this port
ALONE = ("--fake-process-group", "--pipeline-model-parallel-size", "2")
GRAPH = ("--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "1")


class FixedValues(Values):
    """Values that peers send, the same in each step, because a CUDA graph replays the same
    values."""

    def note(self, direction: str, tensor: Tensor) -> None: ...

    def fill(self, direction: str, tensor: Tensor) -> None:
        flat = tensor.detach().view(-1)
        torch.mul(torch.arange(flat.numel(), device=flat.device).sin(), 1e-2, out=flat)


class Steps:
    """Digests of the weights and seconds, by step."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.seconds: list[float] = []

    def set_up(self, model: Any) -> None: ...

    def step(self, run: Callable[[], Any], model: Any) -> Any:
        began = _now()
        result = run()
        self.seconds.append(_now() - began)
        digest = hashlib.sha256()
        for weight in (weight for chunk in model for weight in chunk.parameters()):
            digest.update(bits_of(weight).cpu().numpy().tobytes())
        self.digests.append(digest.hexdigest())
        return result


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def train(kind: str, spec: str, *words: str) -> Steps:
    steps = Steps()

    def alone(config: PipelineConfig) -> Sequence[str]:
        rehearse_with(rehearsed_peers(FixedValues({}), MessageTimes(), lambda: 1024))
        apply(rehearsal.patches(steps))
        return ALONE

    os.environ |= RANK | STORE
    if kind == "cpu":
        torch.compiler.set_stance("force_eager")
        torch.set_num_threads(1)
    launch(
        [
            str(ROOT / "scripts" / "pretrain_gpt.py"),
            *flags(kind, STEPS),
            *layer_flags(kind, "local"),
            *("--pipeline-schedule", spec, "--no-check-for-nan-in-loss-and-grad", *words),
        ],
        _plan_nothing,
        prepare_rehearsal=alone,
    )
    return steps


def _plan_nothing(*unused: object) -> Any:
    raise AssertionError("this test names its schedule, so nothing may be planned")


def eager(kind: str, spec: str) -> None:
    steps = train(kind, spec)
    assert len(set(steps.digests)) == STEPS, "a step has changed no weight"
    _reference(spec).write_text(" ".join(steps.digests))
    tell(f"a rank of two, {spec}, without a graph: a step", _milliseconds(steps))


def graph(kind: str, spec: str) -> None:
    if not _reference(spec).exists():
        raise CannotRun(
            "the weights to compare with are missing, as the case without a graph has "
            "failed or not run"
        )
    whole_graphs.without_the_refusal(setattr)
    if kind == "cpu":
        whole_graphs.captured_on_the_cpu(setattr)
    steps = train(kind, spec, *GRAPH)
    case = f"the same in a graph of the whole iteration, {REPLAYS} replays"
    expected = _reference(spec).read_text().split()
    same = [one == other for one, other in zip(steps.digests, expected, strict=True)]
    how = "weights bitwise" if all(same) else f"other weights from step {same.index(False) + 1} on"
    tell(f"{case}, {spec}", f"{how}; a step {_milliseconds(steps)}", all(same))


def _milliseconds(steps: Steps) -> str:
    return f"{1e3 * statistics.median(steps.seconds[2:]):.1f} ms"


def _reference(spec: str) -> Path:
    return folder() / f"weights-{spec}"


CASES: dict[str, Callable[..., None]] = {"eager": eager, "graph": graph}


def main(kind: str, name: str, *words: str) -> None:
    run_case(" ".join(("whole iterations", name, *words)), lambda: CASES[name](kind, *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
