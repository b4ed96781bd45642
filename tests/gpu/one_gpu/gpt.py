"""A small GPT on one device: its losses under a schedule are those of Megatron's own on one rank.

python -m tests.gpu.one_gpu.gpt cuda|cpu reference LAYERS
python -m tests.gpu.one_gpu.gpt cuda|cpu stock LAYERS
python -m tests.gpu.one_gpu.gpt cuda|cpu schedule LAYERS SPEC async|batched

LAYERS is ``local``, ``engine`` (Transformer Engine's) or ``fp8`` (the same in 8 bits). All
trainings start from one checkpoint, since a rank with several stages would start from other
weights. The activation is compiled in the first F, while receives are posted. If NCCL refuses two
ranks on a device, gloo carries this project's messages by way of the host.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ext.adapter.transformer_engine.installed import can_split
from tests.gpu.one_gpu.rows import CannotRun, run_case, tell
from tests.gpu.one_gpu.two_ranks import RANKS, folder, refusal, run_ranks

STEPS = 4
SIZES = {
    "cuda": {"num-layers": 8, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 1024},
    "cpu": {"num-layers": 4, "hidden-size": 32, "num-attention-heads": 2, "seq-length": 16},
}
FLAGS = """
--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --clip-grad 0 --bf16
--mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --num-workers 0
--eval-iters 0 --eval-interval 1000 --log-interval 1 --distributed-timeout-minutes 1
--attention-dropout 0 --hidden-dropout 0 --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --ckpt-format torch_dist
--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
"""
ENGINE = "--transformer-impl transformer_engine --attention-backend unfused"
LAYERS = {  # flags by kind of layers; FP8 "delayed" is missing, as its state cannot be loaded again
    "local": "--transformer-impl local",
    "engine": ENGINE,
    "fp8": f"{ENGINE} --fp8-format hybrid --fp8-recipe tensorwise",
}
OURS = ("-m", "megatron_ext")
BY_HOST = ("-m", "tests.gpu.one_gpu.gpt_rank")


def flags(kind: str, steps: int) -> list[str]:
    sizes = {**SIZES[kind], "max-position-embeddings": SIZES[kind]["seq-length"]}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    return [*words, *FLAGS.split(), "--train-iters", str(steps)]


def layer_flags(kind: str, layers: str) -> tuple[str, ...]:
    """Return the flags of ``layers``, and raise `CannotRun` without Transformer Engine's
    kernels."""
    if layers != "local" and (kind == "cpu" or not can_split()):
        raise CannotRun("Transformer Engine 2.8 or later is not installed, or there is no GPU")
    return tuple(LAYERS[layers].split())


def train(
    kind: str, name: str, ranks: int, *words: str, steps: int = STEPS, by_host: bool = False
) -> list[str]:
    """Train, and return the losses, digit for digit as Megatron prints them."""
    launcher = BY_HOST if by_host else OURS
    backend = "gloo" if by_host or kind == "cpu" else "nccl"
    printed = run_ranks(
        ranks,
        (
            *(*launcher, "scripts/pretrain_gpt.py", *flags(kind, steps)),
            *("--distributed-backend", backend, "--pipeline-model-parallel-size", str(ranks)),
            *words,
        ),
        name,
        {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"} if kind == "cpu" else {},
    )
    losses = re.findall(r"lm loss: (\S+)", "\n".join(printed))
    assert len(losses) == steps, f"{len(losses)} losses were printed in {steps} steps"
    return losses


def checkpoint(layers: str) -> tuple[str, ...]:
    return "--load", str(folder() / f"checkpoint-{layers}"), "--finetune"


def reference(kind: str, layers: str) -> None:
    """Write the checkpoint from which the other trainings start, and the losses with which theirs
    are compared."""
    words = layer_flags(kind, layers)
    saves = "--save", str(folder() / f"checkpoint-{layers}"), "--save-interval", "1"
    train(kind, f"gpt-{layers}-checkpoint", 1, *words, *saves, steps=1)
    losses = train(kind, f"gpt-{layers}-reference", 1, *words, *checkpoint(layers))
    _reference(layers).write_text(" ".join(losses))
    tell(f"GPT, {layers} layers, stock Megatron on one rank: losses", " ".join(losses))


def stock(kind: str, layers: str) -> None:
    """Compare the losses of Megatron's own pipeline of two ranks with the reference."""
    if refusal():
        raise CannotRun(
            f"Megatron's own pipeline sends only over NCCL, which failed here: {refusal()}"
        )
    messages = "NCCL" if kind == "cuda" else "gloo"
    _compare("stock's 1F1B", messages, layers, *_timed(kind, layers, "stock"))


def schedule(kind: str, layers: str, spec: str, p2p: str) -> None:
    """Compare the losses under ``spec`` with the reference. On the CPU messages go by way of the
    host, as they do where NCCL refuses."""
    by_host = kind == "cpu" or bool(refusal())
    words = "--pipeline-schedule", spec, "--pipeline-p2p", p2p
    run = _timed(kind, layers, f"{spec}-{p2p}", *words, by_host=by_host)
    _compare(f"{spec}, {p2p}", "gloo by the host" if by_host else "NCCL", layers, *run)


def _timed(
    kind: str, layers: str, name: str, *words: str, by_host: bool = False
) -> tuple[list[str], float]:
    words = (*layer_flags(kind, layers), *checkpoint(layers), *words)
    if not _reference(layers).exists():
        raise CannotRun(
            "the losses to compare with are missing, as the reference run has failed or not run"
        )
    begin = time.monotonic()
    losses = train(kind, f"gpt-{layers}-{name}", RANKS, *words, by_host=by_host)
    return losses, time.monotonic() - begin


def _compare(name: str, messages: str, layers: str, losses: list[str], seconds: float) -> None:
    expected = _reference(layers).read_text().split()
    how = "those of one rank" if losses == expected else f"{' '.join(losses)}, not one rank's"
    case = f"GPT, {layers} layers, {name}, two ranks, {messages}: losses"
    tell(case, f"{how}; {seconds:.0f} s from launch to end", losses == expected)


def _reference(layers: str) -> Path:
    return folder() / f"losses-{layers}"


def main(kind: str, name: str, *words: str) -> None:
    cases: dict[str, Callable[..., None]] = {
        "reference": reference,
        "stock": stock,
        "schedule": schedule,
    }
    run_case(" ".join(("GPT", name, *words)), lambda: cases[name](kind, *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
