"""What GPUs reach in training, for estimates where nothing has been measured.

Achieved, not peak: operations per second are what whole trainings are published to reach per GPU,
attention, norms and waiting included, in bf16.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.model.estimate import GPU, Rates


@dataclass(frozen=True)
class Gpu:
    """``memory`` in bytes; None where it is not told."""

    rates: Rates
    memory: int | None = None


_GIB = 2**30

# Memory is what torch shows of it, which is less than the name says, or more.
GPUS = {
    # Narayanan et al. 2021, table 1: 135 to 163e12 a second; Korthikanti et al. 2022, table 5: 41
    # to 56 % of 312e12. Ports of 200 Gb/s InfiniBand.
    # PCIe 4 x16, and NVLink of 300e9 one way, as much of them as in `GPU`.
    "a100": Gpu(Rates(operations=165e12, bytes=20e9, host=12.5e9, peers=200e9), 79 * _GIB),
    # Megatron-LM's README: 41 to 48 % of 989e12. Ports of 400 Gb/s.
    "h100": Gpu(GPU, 78 * _GIB),
    # H100's chip with more memory, by NVIDIA's data sheet.
    "h200": Gpu(GPU, 139 * _GIB),
}
USABLE = 0.9  # of the memory; the rest is left to CUDA, NCCL and temporaries
_EXAMPLE = (
    f"write one of {', '.join(GPUS)}, or what yours reaches: operations=400e12,bytes=40e9,"
    f"memory=80GiB (floating-point operations and bytes of messages per second), and host=25e9, "
    f"bytes to the host or back, where activations are to leave, peers=300e9, bytes to the other "
    f"tensor-parallel ranks"
)


def parse_gpu(text: str) -> Gpu:
    """A name of `GPUS`, or ``operations=400e12,bytes=40e9,host=25e9,peers=300e9,memory=80GiB``
    (host and peers, of which H100's are assumed, and memory may be left out).

    Raises:
        ValueError: neither.
    """
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    given = dict(part.partition("=")[::2] for part in text.split(","))
    needed = {"operations", "bytes"}
    if not needed <= given.keys() <= needed | {"host", "peers", "memory"}:
        raise ValueError(f"GPU {text!r} is not known: {_EXAMPLE}")
    try:
        host, peers = (float(given.get(key, getattr(GPU, key))) for key in ("host", "peers"))
        rates = Rates(float(given["operations"]), float(given["bytes"]), host, peers)
    except ValueError:
        raise ValueError(f"GPU {text!r} has a value that is no number: {_EXAMPLE}") from None
    if not all(0 < rate < 1e30 for rate in astuple(rates)):
        raise ValueError(
            f"GPU {text!r}: operations, bytes, host and peers have to be above 0; {_EXAMPLE}"
        )
    if "memory" not in given:
        return Gpu(rates)
    memory = parse_limit(given["memory"], 1, 1).bytes
    if memory is None:
        raise ValueError(f"GPU {text!r}: memory is written in bytes, as 80GiB; {_EXAMPLE}")
    return Gpu(rates, memory)
