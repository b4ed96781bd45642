"""GPUs: figures of their data sheets (gpus.toml), and the shares that are assumed to be reached.

Users name a GPU; the estimate needs the operations and bytes per second that kernels really reach.
Data sheets tell the peaks. The shares of them that are reached come from papers, from NCCL's
sources and from one H200, or are assumptions; the description of each share says which.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.base.words import shown
from megatron_ext.cost_model.execution import Precision
from megatron_ext.cost_model.messages.collective_seconds import BEGIN, FAR_STEP, NEAR_STEP
from megatron_ext.cost_model.rates import Rates
from megatron_ext.schedule.limit import parse_limit


@dataclass(frozen=True)
class DataSheet:
    """Data sheet of a GPU: peak rates, memory and links in the machine that it is sold in.

    Attributes:
        bf16, fp8, fp4: floating-point operations per second; 0: it has no such units.
        bandwidth: bytes per second of its memory.
        memory: bytes.
        peers: bytes per second to GPUs of its NVLink domain, one way: half of the advertised
            bandwidth.
        domain: number of GPUs that are connected at ``peers``.
        network: bytes per second of a GPU's own port.
        host: bytes per second to the host, one way.
        sms: streaming multiprocessors, or compute units.
        matrices: share of ``bf16`` that the best shapes of matrix products reach.
        eights: share of ``fp8`` that the best shapes of matrix products reach.
        source: source of these figures.
    """

    bf16: float
    fp8: float
    fp4: float
    bandwidth: float
    memory: float
    peers: float
    domain: int
    network: float
    host: float
    sms: int
    matrices: float
    eights: float
    source: str


# Share of the tensor cores' rate in 8 bits that matrix products reach. With this share the
# estimated seconds of 96 products on an H200 are 1.06 times the measured ones in the median
# (docs/measurements.md).
_EIGHTS = 0.58


def _data_sheets() -> dict[str, DataSheet]:
    """Return the data sheets of gpus.toml, keyed by the name of the GPU."""
    tables = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())
    return {
        name: DataSheet(
            memory=table.pop("memory_gib") * 2**30, eights=table.pop("eights", _EIGHTS), **table
        )
        for name, table in tables.items()
    }


DATA_SHEETS = _data_sheets()


@dataclass(frozen=True)
class Achieved:
    """Shares of a data sheet's peak rates that kernels and collectives reach, from 0 to 1.

    Attributes:
        fp4: tensor cores in 4 bits. An assumption.
        grouped: experts' products, relative to single products of their shapes. With the same
            number of rows for each expert the share is 1 on an H200 (docs/measurements.md); with
            uneven routing it is less. An assumption.
        attention, attention_backward: fused causal attention. FlashAttention-2 reaches 50 to 73 %
            of an A100's peak forward, and up to 63 % backward (Dao 2023, arXiv:2307.08691, section
            4.1); FlashAttention-3 similar shares of an H100's (Shah et al. 2024, arXiv:2407.08608).
            cuDNN's on an H200: estimated over measured seconds are 0.84 to 1.09.
        memory: elementwise operations. On an H200 estimated over measured seconds are 0.80 to 1.13.
        peers: rings over NVLink: NCCL assumes at most 235 GB/s on an A100 (``compCap80`` in
            src/graph/tuning.cc), 18 x 20.6 of 450 GB/s on an H100 and 18 x 40.1 of 900 GB/s on a
            B200 (SM90_NVLINK_BW, SM100_NVLINK_BW in src/graph/topo.h).
        network: messages and rings between nodes. An assumption.
        host: copies to the host. Two GPUs often share a switch, and both directions the host's
            memory. An assumption.
    """

    fp4: float = 0.48
    grouped: float = 0.8
    attention: float = 0.6
    attention_backward: float = 0.5
    memory: float = 0.8
    peers: float = 235 / 300
    network: float = 0.8
    host: float = 0.39


ACHIEVED = Achieved()
# Bytes of operands that the second-level cache delivers for each floating-point operation: 5,120
# bytes a clock of an A100 at 1.41 GHz, for 312e12 operations a second (NVIDIA A100 Tensor Core GPU
# Architecture, 2020). Other GPUs are assumed to have the same ratio.
OPERANDS = 5120 * 1.41e9 / 312e12
# Random numbers per second that PyTorch's dropout draws on one SM of an A100: 1.0e11 on all 108,
# according to F of the zero-bubble paper's 1.5B model (rows 572 to 574 of measured.csv in
# scripts/evaluation). With this rate the estimated F of its 14.6B model is 0.94 of the measured
# one. Other GPUs are assumed to draw as fast.
DRAWN = 1.0e11 / 108
# Factor on the seconds of weight gradients' products in MXFP8, relative to one scale for a tensor.
# It includes casts: operands are cast a second time, along the other dimension, with scales of
# their own. The factor comes from fine-tuning of Llama 3 70B on GB200 (rows 25 and 26 of
# measured.csv in scripts/evaluation); LoRA, without weight gradients, takes as long in both formats
# (rows 28 and 29). With the factor the ratio of rows 424 and 425 is predicted within 1 %.
MXFP8_WEIGHTS = 1.3
# Shares of the time of experts' `alltoall` messages that overlapped passes hide on GPUs before
# Blackwell (on GPUs without fp4, AMD's too), with many hardware queues and with one queue, in which
# a message blocks the passes issued behind it. They come from Megatron-LM #6311 on 64 H100s, with
# CUDA_DEVICE_MAX_CONNECTIONS of 32 and 1 (rows 331 and 332 of measured.csv in scripts/evaluation).
OVERLAP, OVERLAP_IN_ONE_QUEUE = 1 / 3, 1 / 6
# Seconds from one kernel to the next if the host has launched both ahead: 3.8 us for a kernel of
# 2.9 us (https://developer.nvidia.com/blog/cuda-graphs/).
KERNEL = 0.9e-6
# Seconds that a pass of a chunk takes in addition to its operations if the host launches it:
# messages are posted and waited for, and the first kernels reach an idle GPU. An assumption, as
# `ACHIEVED`.
LAUNCH = 0.2e-3
# Latency in seconds of a message to a peer over NVLink, and over the network. A message takes the
# latency in addition to the time of its bytes.
LATENCIES = BEGIN + NEAR_STEP, BEGIN + FAR_STEP


@dataclass(frozen=True)
class Gpu:
    """GPU for which costs are estimated.

    Attributes:
        memory: bytes; None if not given.
        sheet: its data sheet; None if only rates of whole trainings are known.
        training_rates: rates that whole trainings reach on it; None if ``sheet`` is known.
    """

    memory: float | None = None
    sheet: DataSheet | None = None
    training_rates: Rates | None = None

    def rates(self, precision: Precision = Precision.BF16) -> Rates:
        """Return the rates (operations and bytes per second) that this GPU reaches in
        ``precision``.

        Raises:
            ValueError: the GPU has no tensor cores for this precision.
        """
        if self.training_rates is not None:
            return self.training_rates
        assert self.sheet is not None
        sheet = self.sheet
        matrix = sheet.bf16 * sheet.matrices
        linear = {
            Precision.FP32: matrix / 2,  # TF32
            Precision.BF16: matrix,
            Precision.FP8: sheet.fp8 * sheet.eights,
            Precision.MXFP8: sheet.fp8 * sheet.eights,
            Precision.FP4: sheet.fp4 * ACHIEVED.fp4,
        }[precision]
        if not linear:
            able = ", ".join(name for name, gpu in GPUS.items() if gpu.can(precision))
            raise ValueError(
                f"--gpu: this GPU has no tensor cores for {precision}; name one of {able}"
            )
        is_before_blackwell = not sheet.fp4
        return Rates(
            linear=linear,
            grouped=linear * ACHIEVED.grouped,
            matrix=matrix,
            attention=sheet.bf16 * ACHIEVED.attention,
            memory=sheet.bandwidth * ACHIEVED.memory,
            network=sheet.network * ACHIEVED.network,
            peers=sheet.peers * ACHIEVED.peers,
            host=sheet.host * ACHIEVED.host,
            domain=sheet.domain,
            launch=LAUNCH,
            peer_latency=LATENCIES[0],
            network_latency=LATENCIES[1],
            sms=sheet.sms,
            operands=sheet.bf16 * OPERANDS,
            kernel=KERNEL,
            attention_backward=sheet.bf16 * ACHIEVED.attention_backward,
            slower_weights=MXFP8_WEIGHTS if precision is Precision.MXFP8 else 1.0,
            drawn=sheet.sms * DRAWN,
            overlap=OVERLAP if is_before_blackwell else 1.0,
            overlap_in_one_queue=OVERLAP_IN_ONE_QUEUE if is_before_blackwell else 1.0,
        )

    def can(self, precision: Precision) -> bool:
        """Return whether the GPU has units for matrix products in ``precision``."""
        sheet = self.sheet
        units = {Precision.FP8: "fp8", Precision.MXFP8: "fp8", Precision.FP4: "fp4"}
        return sheet is None or precision not in units or getattr(sheet, units[precision]) > 0


GPUS = {name: Gpu(sheet.memory, sheet) for name, sheet in DATA_SHEETS.items()}
# Share of a GPU's memory that a rank may take, CUDA's context, NCCL's buffers and the allocator's
# reserve included. CUDA hands out less than a GPU has: of 80 GiB 79.25 on an A100 and 79.33 on an
# A800, as errors of PyTorch say that users have reported.
USABLE = 0.99
# Bytes that torch's allocator reserves beyond its allocations, as a share of what is allocated and
# freed again in a step: 15 % on average of eight language models on A100s, without expandable
# segments (Guo et al. 2024, GMLake, arXiv:2401.08156). Tensors that are allocated once reserve
# nothing.
RESERVED_SHARE = 0.15


@dataclass(frozen=True)
class FreeMemory:
    """Memory of a GPU that a rank may use: for tensors, and for its allocator's reserve.

    Attributes:
        allocated: bytes that a rank may take in addition to ``reserved``.
        reserved: bytes that its allocator reserves beyond its allocations.
        is_modelled: whether ``reserved`` is an assumed share, not measured in this training.
    """

    allocated: float
    reserved: float
    is_modelled: bool

    @property
    def usable(self) -> float:
        """Bytes of a GPU that a rank may take, including all that its allocator reserves."""
        return self.allocated + self.reserved

    def reserved_for(self, allocated: float, lasting: float) -> float:
        """Return the bytes that an allocator reserves beyond ``allocated`` bytes.

        ``lasting`` of these bytes are allocated once, so no reserve is added for them.
        """
        return RESERVED_SHARE * max(allocated - lasting, 0.0) if self.is_modelled else self.reserved


def free_memory(
    memory: float, reserved: float | None = None, *, lasting: float = 0.0
) -> FreeMemory:
    """Return how the usable bytes of a GPU are split into allocated and reserved bytes.

    Args:
        memory: bytes of the GPU.
        reserved: bytes that an allocator was measured to reserve beyond its allocations, if known.
        lasting: bytes of a rank that are allocated once (`ModelBytes.lasting`), so that no reserve
            is added for them.
    """
    usable = USABLE * memory
    is_modelled = reserved is None
    if reserved is None:
        reserved = RESERVED_SHARE * max(usable - lasting, 0.0) / (1 + RESERVED_SHARE)
    return FreeMemory(usable - reserved, reserved, is_modelled)


_MOST_RANKS = 100_000
_SIZE = re.compile(r"(\d+)gb?")  # Memory in the name that a driver gives a GPU: 40GB, 144G

_EXAMPLE = (
    f"write one of {', '.join(GPUS)}, or your GPU's rates and memory: operations=400e12,bytes=40e9,"
    "memory=80GiB (floating-point operations and bytes of messages per second); host=25e9 adds the "
    "bytes per second to or from the host, for offload, and peers=300e9 those to the other "
    "tensor-parallel ranks"
)
# The rates assumed if the GPU is not known.
GPU = GPUS["h100"].rates()


def assumed_rates(precision: Precision) -> Rates:
    """Return the rates of an H100, or of a B200 if an H100 cannot compute in ``precision``."""
    gpu = GPUS["h100"]
    return (gpu if gpu.can(precision) else GPUS["b200"]).rates(precision)


def gpu_named(name: str) -> Gpu | None:
    """Return the GPU that its driver calls ``name``, such as ``NVIDIA GB200`` or ``AMD Instinct
    MI300X``; None if `GPUS` lacks it."""
    sheet = name_of_gpu(name)
    return None if sheet is None else GPUS[sheet]


def name_of_gpu(name: str) -> str | None:
    """Return the short name, a key of `GPUS`, of the GPU that its driver calls ``name``; else None.

    A GPU that is sold with less or more memory has keys with the size, such as ``a100-40``.
    """
    words = name.lower().replace("-", " ").split()
    known = next((word for word in words if word in GPUS), None)
    sizes = (found[1] for word in words if (found := _SIZE.fullmatch(word)))
    with_size = (key for size in sizes if (key := f"{known}-{size}") in GPUS)
    return next(with_size, known)


def short_name(gpu: Gpu | None) -> str | None:
    """Return the short name of ``gpu``, a key of `GPUS`; None if its data sheet is unknown."""
    sheet = None if gpu is None else gpu.sheet
    return next((name for name, known in DATA_SHEETS.items() if known is sheet), None)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPU of each pipeline rank that a text such as ``h100:6,a100:2`` names.

    Text without numbers of ranks names the one GPU that `parse_gpu` reads.

    Raises:
        ValueError: as `parse_gpu`, or a number of ranks is not a number.
    """
    parts = [part.partition(":") for part in text.split(",")]
    if not all(colon and "=" not in name for name, colon, _ in parts):
        return (parse_gpu(text),)
    gpus: list[Gpu] = []
    for name, _, count in parts:
        if not (count.isdecimal() and 0 < int(count) <= _MOST_RANKS):
            raise ValueError(
                f"--gpu {shown(text)}: {shown(count)} is not a number of pipeline ranks; write "
                "h100:6,a100:2 for six ranks with one type of GPU and two with another"
            )
        gpus += [parse_gpu(name)] * int(count)
    return tuple(gpus)


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that ``text`` describes: a name of `GPUS`, or
    ``operations=400e12,bytes=40e9,host=25e9,peers=300e9,memory=80GiB``.

    ``host`` and ``peers``, which default to an H100's, and ``memory`` are optional.

    Raises:
        ValueError: ``text`` is neither a name nor such rates.
    """
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    given = dict(part.partition("=")[::2] for part in text.split(","))
    needed = {"operations", "bytes"}
    if not needed <= given.keys() <= needed | {"host", "peers", "memory"}:
        raise ValueError(f"GPU {shown(text)!r} is not known: {_EXAMPLE}")
    try:
        host, peers = (float(given.get(key, getattr(GPU, key))) for key in ("host", "peers"))
        operations, network = float(given["operations"]), float(given["bytes"])
    except ValueError:
        raise ValueError(f"GPU {shown(text)!r} has a value that is no number: {_EXAMPLE}") from None
    if not all(1 <= rate < 1e30 for rate in (operations, network, host, peers)):
        raise ValueError(
            f"GPU {shown(text)!r}: operations, bytes, host and peers have to be at least 1 a "
            f"second, and below 1e30; {_EXAMPLE}"
        )
    near, far = LATENCIES
    training_rates = replace(
        Rates.from_training_speed(operations, network, host, peers),
        peer_latency=near,
        network_latency=far,
    )
    if "memory" not in given:
        return Gpu(training_rates=training_rates)
    memory = parse_limit(given["memory"], 1, 1).bytes
    if memory is None:
        raise ValueError(f"GPU {shown(text)!r}: memory is written in bytes, as 80GiB; {_EXAMPLE}")
    return Gpu(memory, training_rates=training_rates)
