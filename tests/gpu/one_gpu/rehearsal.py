"""Rehearsals of a model on one device, and criteria that would disprove them, written before any
ran.

python -m tests.gpu.one_gpu.rehearsal cuda|cpu line    Megatron's own 1F1B and zb-h1
python -m tests.gpu.one_gpu.rehearsal cuda|cpu v       zb-v, v-half, and zb-v's split vocabulary
python -m tests.gpu.one_gpu.rehearsal cuda|cpu truth   a real step without a pipeline
python -m tests.gpu.one_gpu.rehearsal cuda|cpu replay  zb-v replayed, with thread blocks and without
python -m tests.gpu.one_gpu.rehearsal cuda|cpu loops   Megatron's interleaved and interleaved-zb
python -m tests.gpu.one_gpu.rehearsal cuda|cpu values  zb-v with zeros, normal and real values
python -m tests.gpu.one_gpu.rehearsal cuda|cpu offload zb-v with all activations on the host

Each criterion of `CRITERIA` that a case can answer is a row with its value. A criterion that does
not hold is a result, and no failure of the case.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.adapter.transformer_engine.installed import can_split
from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.rehearsal.prepare import schedules_of
from megatron_ext.rehearsal.processes import rank_processes
from megatron_ext.rehearsal.rehearsal_report import RankResult, RehearsalReport
from megatron_ext.rehearsal.rehearse import RehearsalRequest, rehearse
from megatron_ext.rehearsal.request import PeerValues
from tests.gpu.one_gpu.rows import CannotRun, Row, State, run_case, tell
from tests.gpu.one_gpu.two_ranks import folder

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"


@dataclass(frozen=True)
class Criterion:
    """Criterion that disproves the model behind a rehearsal if its value is above ``limit``."""

    what: str
    limit: float
    unit: str = "%"

    def told(self, figure: float) -> str:
        verdict = "holds" if figure <= self.limit else "DOES NOT HOLD"
        return f"{self.what}: {figure:.3g} {self.unit}, limit {self.limit:g}: {verdict}"


# Criteria of the rehearsal with their limits, as they were written before the first run on a GPU.
ALLOCATED = Criterion("allocated peak off the account, on any rank", 3)
RESERVED = Criterion("reserved above the prediction, of the activations", 15)
TRUTH = Criterion("sum of rehearsed passes off a real step without a pipeline", 2)
REPLAYED = Criterion("replayed step above the step composed of ranks alone", 3)
OWN_END = Criterion("composed step off the end of a replayed rank", 1)
BLOCKS = Criterion("passes slower beside the blocks of waiting receives", 5)
SPLIT = Criterion("I and W over B", 1.05, "times")
ESTIMATED = Criterion("a pass off its estimate", 15)
GAIN = Criterion("gain over stock off the estimated one", 5, "points")
CRITERIA = (ALLOCATED, RESERVED, TRUTH, REPLAYED, OWN_END, BLOCKS, SPLIT, ESTIMATED, GAIN)

SIZES = {
    "cuda": {  # sizes of Llama 3 8B
        **{"num-layers": 32, "hidden-size": 4096, "num-attention-heads": 32, "seq-length": 8192},
        **{"ffn-hidden-size": 14336, "num-query-groups": 8, "vocab-size": 128255},
    },
    "cpu": {
        **{"num-layers": 16, "hidden-size": 32, "num-attention-heads": 2, "seq-length": 32},
        **{"ffn-hidden-size": 64, "num-query-groups": 1, "vocab-size": 127},
    },
}
TRUTH_SIZES = {
    "cuda": {"num-layers": 16, "hidden-size": 2048, "num-attention-heads": 16, "seq-length": 4096},
    "cpu": {"num-layers": 8, "hidden-size": 64, "num-attention-heads": 2, "seq-length": 64},
}
FLAGS = """
--micro-batch-size 1 --lr 1e-5 --bf16 --train-iters 8 --clip-grad 1.0
--mock-data --tokenizer-type NullTokenizer --num-workers 0 --untie-embeddings-and-output-weights
--eval-iters 0 --eval-interval 1000 --log-interval 1 --attention-dropout 0 --hidden-dropout 0
--swiglu --disable-bias-linear --normalization RMSNorm --no-gradient-accumulation-fusion
"""
SHORT = 2048  # tokens of a sequence if Transformer Engine's attention is not used


def command(kind: str, sizes: dict[str, int], ranks: int, microbatches: int) -> list[str]:
    sizes = {"vocab-size": 127 if kind == "cpu" else 32767, **sizes}
    engine = kind == "cuda" and can_split()
    if kind == "cuda" and not engine:
        sizes["seq-length"] = min(sizes["seq-length"], SHORT)
    words = FLAGS.split()
    if "num-query-groups" in sizes:
        words.append("--group-query-attention")
    words += ["--transformer-impl", "transformer_engine" if engine else "local"]
    if not engine:
        words += ["--no-persist-layer-norm", "--no-masked-softmax-fusion"]
    sizes = {**sizes, "max-position-embeddings": sizes["seq-length"]}
    words += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    words += ["--global-batch-size", str(microbatches)]
    words += ["--pipeline-model-parallel-size", str(ranks)]
    return ["torchrun", "--nproc-per-node", str(ranks), str(SCRIPT), *words]


def rehearsed(
    kind: str, name: str, words: Sequence[str], schedules: str, **settings: Any
) -> RehearsalReport:
    """Rehearse the command ``words``, and write the report at once. ``settings`` are further fields
    of the request."""
    own = folder() / name
    request = RehearsalRequest(
        read_launch(words), schedules_of(schedules), own, is_cpu=kind == "cpu", **settings
    )
    report = rehearse(request, rank_processes, lambda text: print(text, flush=True))
    Path(own, "report.json").write_text(json.dumps(asdict(report), indent=2))
    return report


def line(kind: str) -> None:
    report = rehearsed(kind, "line", command(kind, SIZES[kind], 8, 16), "stock zb-h1")
    stock, ours = report.schedules
    rows = {(one.schedule, one.pipeline_rank): one for one in report.ranks}
    told = [
        f"{one.name} {one.seconds:.3f} s, bubble {one.bubble:.1%}, estimated "
        f"{one.estimate.seconds:.3f} s"
        for one in report.schedules
    ]
    tell("rehearsal line", "; ".join(told))
    ratios = [
        (one.seconds["I"] + one.seconds["W"]) / rows["stock", rank].seconds["B"]
        for (name, rank), one in rows.items()
        if name == "zb-h1" and ("stock", rank) in rows
    ]
    answer("line", SPLIT, max(ratios))
    _answer_ranks("line", report.ranks)
    measured = 1 - ours.of_first
    estimated = 1 - ours.estimate.seconds / stock.estimate.seconds
    answer("line", GAIN, 100 * abs(measured - estimated) if measured * estimated > 0 else 100.0)


def v(kind: str) -> None:
    words = command(kind, SIZES[kind], 8, 16)
    reports = [rehearsed(kind, "v", words, "zb-v v-half")]
    divided = [*words, "--pipeline-schedule", "zb-v", "--pipeline-vocab-parallel", "1"]
    reports.append(rehearsed(kind, "v-vocabulary", divided, "zb-v"))
    named = [("", one) for one in reports[0].schedules]
    named += [(", vocabulary 1", one) for one in reports[1].schedules]
    told = [f"{one.name}{more} {one.seconds:.3f} s, bubble {one.bubble:.1%}" for more, one in named]
    tell("rehearsal v", "; ".join(told))
    _answer_ranks("v", [rank for report in reports for rank in report.ranks])


def truth(kind: str) -> None:
    sizes = TRUTH_SIZES[kind]
    report = rehearsed(kind, "truth", command(kind, sizes, 4, 8), "stock")
    passes = sum(
        len(one.stands_for) * (_passes_of(one, microbatches=8) + one.outside)
        for one in report.ranks
    )
    took = _real_step(command(kind, sizes, 1, 8))
    tell("rehearsal truth", f"a real step {took:.3f} s, the ranks' together {passes:.3f} s")
    answer("truth", TRUTH, 100 * abs(passes / took - 1))


def replay(kind: str) -> None:
    words = command(kind, SIZES[kind], 8, 16)
    report = rehearsed(kind, "replay", words, "zb-v", replays=True)
    (one,) = report.replays
    alone, replayed = report.schedules[0].seconds, one.figures.seconds
    tell("rehearsal replay", f"zb-v {alone:.3f} s, replayed {replayed:.3f} s")
    answer("replay", REPLAYED, 100 * (one.over_alone - 1))
    answer("replay", OWN_END, 100 * one.off_end)
    if kind == "cpu":
        reason = f"{BLOCKS.what}, limit {BLOCKS.limit:g} %: needs a GPU's thread blocks"
        print(Row("rehearsal replay", reason, State.CANNOT_RUN).line(), flush=True)
        return
    without = rehearsed(kind, "replay-without", words, "zb-v", replays=True, has_blocks=False)
    answer("replay", BLOCKS, 100 * (_replayed_passes(report) / _replayed_passes(without) - 1))


def _replayed_passes(report: RehearsalReport) -> float:
    """Return the sum of the seconds of passes, over all kinds and all ranks that were replayed."""
    return sum(sum(one.seconds.values()) for one in report.ranks if one.is_replay)


def loops(kind: str) -> None:
    words = command(kind, SIZES[kind], 8, 16)
    words += ["--num-virtual-stages-per-pipeline-rank", "2"]
    report = rehearsed(kind, "loops", words, "stock interleaved-zb")
    told = [f"{one.name} {one.seconds:.3f} s, bubble {one.bubble:.1%}" for one in report.schedules]
    tell("rehearsal loops", "; ".join(told))
    _answer_ranks("loops", report.ranks)


def values(kind: str) -> None:
    """Rehearse zb-v with each kind of values. The first rank receives no real values, since no
    other rank has run before, so only the second rank's result counts."""
    words = command(kind, SIZES[kind], 8, 16)
    told = []
    for of in PeerValues:
        report = rehearsed(kind, f"values-{of}", words, "zb-v", values=of, warm_up=1, steps=2)
        (rank,) = (one for one in report.ranks if one.pipeline_rank != 7)
        assert bool(rank.real) == (of is PeerValues.REAL)
        told.append(f"{of} " + ", ".join(f"{k} {1e3 * s:.2f} ms" for k, s in rank.seconds.items()))
    tell("rehearsal values", "; ".join(told))


def offload(kind: str) -> None:
    """Rehearse zb-v with activation offload. Copies run at the host's own rate: a rank that waits
    for them has longer gaps."""
    words = command(kind, SIZES[kind], 8, 16)
    words += ["--pipeline-schedule", "zb-v", "--pipeline-activation-offload", "full"]
    report = rehearsed(kind, "offload", words, "zb-v")
    told = [
        f"rank {one.pipeline_rank} {1e3 * one.between:.1f} ms between passes, most allocated "
        f"{'unknown' if one.allocated is None else f'{one.allocated / 2**30:.2f} GiB'}"
        for one in report.ranks
    ]
    tell("rehearsal offload", f"zb-v {report.schedules[0].seconds:.3f} s; " + "; ".join(told))
    _answer_ranks("offload", report.ranks)


def _passes_of(rank: RankResult, microbatches: int) -> float:
    return microbatches * sum(rank.seconds.values()) + rank.between


def _real_step(words: list[str]) -> float:
    """Return the median seconds of the last iterations of a training without a pipeline."""
    own = ["-m", "torch.distributed.run", *words[1:3], "--standalone", "-m", "megatron_ext"]
    ran = subprocess.run(
        [sys.executable, *own, *words[3:]], capture_output=True, text=True, cwd=ROOT
    )
    seconds = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", ran.stdout)
    if ran.returncode or len(seconds) < 4:
        raise RuntimeError((ran.stderr or ran.stdout).strip()[-500:])
    return statistics.median(map(float, seconds[-4:])) / 1000


def answer(case: str, criterion: Criterion, figure: float) -> None:
    tell(f"rehearsal {case}", criterion.told(figure))


def _answer_ranks(case: str, ranks: Sequence[RankResult]) -> None:
    """Answer the criteria on passes and bytes with the largest value of all ranks."""
    off = [
        100 * abs(seconds / one.estimated[kind] - 1)
        for one in ranks
        for kind, seconds in one.seconds.items()
        # Only kinds with an estimate are compared: on the CPU the embedding's lookups have none.
        if one.estimated[kind]
    ]
    answer(case, ESTIMATED, max(off))
    for criterion, figure in ((ALLOCATED, _off_account), (RESERVED, _above_prediction)):
        figures = list(_figures(ranks, figure))
        if figures:
            answer(case, criterion, max(figures))
        else:
            reason = f"{criterion.what}, limit {criterion.limit:g} %: needs a GPU's allocator"
            print(Row(f"rehearsal {case}", reason, State.CANNOT_RUN).line(), flush=True)


def _figures(
    ranks: Sequence[RankResult], of: Callable[[RankResult], float | None]
) -> Iterator[float]:
    for one in ranks:
        figure = of(one)
        if figure is not None:
            yield figure


def _off_account(one: RankResult) -> float | None:
    if one.allocated is None or one.predicted is None:
        return None
    return 100 * abs(one.allocated / one.predicted - 1)


def _above_prediction(one: RankResult) -> float | None:
    if one.reserved is None or one.predicted is None or not one.activations:
        return None
    return 100 * (one.reserved - one.predicted) / one.activations


CASES = {
    **{"line": line, "v": v, "truth": truth},
    **{"replay": replay, "loops": loops, "values": values, "offload": offload},
}


def main(kind: str, case: str) -> None:
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise CannotRun("torch finds no GPU here")
    CASES[case](kind)


if __name__ == "__main__":
    run_case(f"rehearsal {sys.argv[2]}", lambda: main(*sys.argv[1:]))
