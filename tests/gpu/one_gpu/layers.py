"""Transformer Engine's layers on one GPU: gradients of layers whose W waits are bitwise the same.

python -m tests.gpu.one_gpu.layers cuda|cpu bf16|"fp8 delayed"|mxfp8|...
"""

from __future__ import annotations

import sys

from megatron_ext.adapter.transformer_engine.installed import can_split
from megatron_ext.patches.engine import apply
from tests.gpu.one_gpu.rows import CannotRun, run_case, tell


def layers(kind: str, precision: str) -> None:
    if kind == "cpu":
        _stand_in(precision)
    elif not can_split():
        raise CannotRun("Transformer Engine 2.8 or later is not installed")
    # te_layers imports Transformer Engine, so it is imported only here.
    from tests.gpu.te_layers import LAYERS, differences, missing

    if kind == "cuda" and (lack := missing(precision)):
        raise CannotRun(lack)
    for name in LAYERS:
        for fused in (False, True):
            different = differences(name, precision, fused, kind)
            words = "fused accumulation" if fused else "unfused"
            figure = f"differ: {', '.join(different)}" if different else "bitwise stock's"
            tell(f"{name}, {precision}, {words}: gradients", figure, not different)


def _stand_in(precision: str) -> None:
    """Load Transformer Engine's Python classes over torch's operations, if tests have fetched
    them."""
    from megatron_ext.patches import cpu
    from tests.helpers.fetched import FETCHED
    from tests.helpers.transformer_engine_on_cpu import VERSIONS, load

    folder = FETCHED / "transformer_engine" / VERSIONS[-1]
    if precision != "bf16":
        raise CannotRun("FP8 cannot be rehearsed on the CPU")
    if not folder.exists():
        raise CannotRun(f"{folder.name} has not been fetched by tests/patches")
    load(folder)
    apply([patch for patch in cpu.patches() if patch.target.startswith("torch")])


def main(kind: str, *precision: str) -> None:
    run_case(f"layers {' '.join(precision)}", lambda: layers(kind, " ".join(precision)))


if __name__ == "__main__":
    main(*sys.argv[1:])
