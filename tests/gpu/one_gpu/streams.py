"""Memory and events that several streams of one device share.

python -m tests.gpu.one_gpu.streams cuda|cpu experts SPEC none|full
python -m tests.gpu.one_gpu.streams cuda|cpu capture

A GPT with experts, whose shared expert runs on a stream of its own, must have the same losses with
and without activation offload. Under TORCH_CUDA_SANITIZER=1, torch also looks for unordered
accesses of two streams to one tensor. It does not see memory that is freed too early; only the
losses show that.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import apply
from megatron_ext.patches.torch.cuda import graphs
from megatron_ext.runtime import watchdog
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule.action import Action, Kind
from tests.gpu.one_gpu.gpt import layer_flags, train
from tests.gpu.one_gpu.rows import CannotRun, run_case, tell
from tests.gpu.one_gpu.two_ranks import RANKS, folder, refusal

# Length of a sequence. With 4,096 tokens and 4 experts for each token, the indices of 8 bytes are
# just large enough to be offloaded.
SEQUENCE = {"cuda": "4096", "cpu": "16"}
EXPERTS = """
--num-layers 4 --num-attention-heads 2 --num-experts 8 --moe-router-topk 4
--moe-ffn-hidden-size 128 --moe-aux-loss-coeff 1e-2
--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 256
--moe-shared-expert-overlap
"""
COMPARABLE = {
    # Nothing is compiled under the dispatch mode of torch's sanitizer, and compiled code rounds
    # differently.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron requires these variables with --deterministic-mode.
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def experts(kind: str, spec: str, offload: str) -> None:
    """Compare losses with and without offload. On the CPU messages go by way of the host, as they
    do where NCCL refuses."""
    by_host = kind == "cpu" or bool(refusal())
    if kind == "cuda":
        os.environ |= COMPARABLE
    words = (
        *layer_flags(kind, "local"),
        *EXPERTS.split(),
        *("--seq-length", SEQUENCE[kind], "--max-position-embeddings", SEQUENCE[kind]),
        *(["--deterministic-mode"] if kind == "cuda" else []),
        *("--pipeline-schedule", spec, "--pipeline-activation-offload", offload),
    )
    is_checked = "TORCH_CUDA_SANITIZER" in os.environ
    name = f"shared experts, {spec}, offload {offload}{', under the sanitizer' * is_checked}"
    losses = train(kind, name.replace(", ", "-").replace(" ", "-"), RANKS, *words, by_host=by_host)
    reference = folder() / f"losses-{spec}"
    if offload == "none":
        reference.write_text(" ".join(losses))
        tell(f"{name}: losses", " ".join(losses))
        return
    if not reference.exists():
        raise CannotRun(
            "the losses to compare with are missing, as the run without offload has "
            "failed or not run"
        )
    is_same = reference.read_text().split() == losses
    figure = "those without" if is_same else f"{' '.join(losses)}, not those without"
    tell(f"{name}: losses", figure, is_same)


def capture(kind: str) -> None:
    """Capture a CUDA graph while the watchdog of a step runs in another thread. The step has just
    ended when the capture begins."""
    if kind == "cpu":
        raise CannotRun("CUDA graphs can be captured only on a GPU")
    watchdog.LOOK_SECONDS = 0.01
    torch.cuda.init()
    recorder = Recorder(0)
    watchdog.Watchdog(recorder).start()
    with apply(graphs.patches(PipelineConfig())):
        figure, is_good = _captured(recorder)
    tell("a graph captured beside the watchdog", figure, is_good)
    # The capture under the watchdog comes last, as it may leave the device in a bad state.
    figure, _ = _captured(recorder)
    tell("the same where the watchdog asks", figure)


def _captured(recorder: Recorder) -> tuple[str, bool]:
    x, y = torch.ones(2, 1024, device="cuda")
    torch.cuda.synchronize()
    with recorder.computing(Action(0, Kind.FORWARD, 0)):
        torch.cuda._sleep(1000)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):  # the capture begins with a synchronisation
            y.add_(x)
            time.sleep(50 * watchdog.LOOK_SECONDS)
            y.add_(x)
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"fails: {str(error).splitlines()[0]}", False
    is_right = bool((y == 3).all())
    return "replayed, right" if is_right else "replayed, **wrong**", is_right


def main(kind: str, name: str, *words: str) -> None:
    cases: dict[str, Callable[..., None]] = {"experts": experts, "capture": capture}
    run_case(" ".join(("streams", name, *words)), lambda: cases[name](kind, *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
