"""The executor on one GPU: ranks are forked, tensors are on the device, and gloo carries messages.

python -m tests.gpu.one_gpu.executor cuda|cpu step SPEC RANKS async|batched
python -m tests.gpu.one_gpu.executor cuda|cpu offload SPEC RANKS
python -m tests.gpu.one_gpu.executor cuda|cpu copies
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.problem import P2P, Offload
from tests.gpu.offloading import Copies, measure_copies
from tests.gpu.offloading import step as offload_step
from tests.gpu.one_gpu.rows import run_case, tell
from tests.gpu.small_stages import (
    SHAPES,
    TOLERANCE,
    Seen,
    boundary_bytes,
    device_of,
    expected_peaks,
    on_rank,
    program_of,
    relative_errors,
)
from tests.helpers.ranks import run_ranks, values


def step(kind: str, spec: str, ranks: str, p2p: str) -> None:
    program = program_of(spec, int(ranks), P2P(p2p))
    run = partial(on_rank, program=program, device=device_of(kind), shape=SHAPES[kind])
    seen: list[Seen] = values(run_ranks(int(ranks), run, timeout=60))
    tell_step(f"executor, {spec}, {p2p}, {ranks} ranks, gloo by the host", seen, program, kind)


def tell_step(name: str, seen: Sequence[Seen], program: Program, kind: str) -> None:
    """Print the rows of a step's gradients and peaks."""
    tell_gradients(name, seen)
    peaks = [rank.peak for rank in seen]
    expected = expected_peaks(program, seen, boundary_bytes(kind))
    error = max(map(abs, relative_errors(peaks, expected)))
    tell(f"{name}: peak, active bytes", _beside(peaks, expected), error <= TOLERANCE)


def tell_gradients(name: str, seen: Sequence[Seen]) -> None:
    different = [rank for rank, result in enumerate(seen) if not result.gradients_are_stocks]
    how = f"ranks {different} differ from one process" if different else "bitwise one process's"
    tell(f"{name}: gradients", how, not different)


def _beside(measured: Sequence[float], expected: Sequence[float]) -> str:
    """Return the measured and the predicted MiB of each rank as text."""
    errors = relative_errors(measured, expected)
    figures = zip(measured, expected, errors, strict=True)
    return "; ".join(
        f"{got / 2**20:.1f} MiB of {wanted / 2**20:.1f} ({error:+.1%})"
        for got, wanted, error in figures
    )


def offload(kind: str, spec: str, ranks: str) -> None:
    without, with_offload = (
        offload_step(spec, int(ranks), kind, way) for way in (Offload.NONE, Offload.FULL)
    )
    name = f"offload, {spec}, {ranks} ranks"
    tell_gradients(name, with_offload.seen)
    most = max(without.peaks)
    for words, result in (("without", without), ("with", with_offload)):
        pairs = zip(result.peaks, result.expected, strict=True)
        is_close = all(abs(got - wanted) <= TOLERANCE * most for got, wanted in pairs)
        figures = _beside(result.peaks, result.expected)
        tell(f"{name}: peak {words} it, active bytes", figures, is_close)


def copies(kind: str) -> None:
    measured: Copies
    (measured,) = values(run_ranks(1, partial(measure_copies, kind=kind), timeout=60))
    bandwidth = f"{measured.to_host:.1f}, {measured.from_host:.1f}, {measured.both:.1f} GB/s"
    tell("copies to pinned host memory, from it, both at once", bandwidth)
    ratio = measured.with_compute / measured.compute
    tell("matmuls with a copy beside them", f"{ratio:.2f} times as long as alone")


CASES: dict[str, Callable[..., None]] = {"step": step, "offload": offload, "copies": copies}


def main(kind: str, name: str, *words: str) -> None:
    run_case(" ".join(("executor", name, *words)), lambda: CASES[name](kind, *words))


if __name__ == "__main__":
    main(*sys.argv[1:])
