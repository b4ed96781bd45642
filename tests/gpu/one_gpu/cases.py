"""The cases that one device can show, in parts."""

from __future__ import annotations

from tests.gpu.one_gpu.runner import Case, Part

_HERE = "tests.gpu.one_gpu"
# calls that host_calls.py defines; they are named here, as this file must not import torch
CALLS = (
    *("synchronize", "event", "item", "large_empty", "allocator_retry", "empty_cache"),
    *("never_used", "first_matmul", "host_register", "pin_memory", "from_pageable"),
    "first_compiled",
)
SCHEDULES = (("zb-h1", "async"), ("zb-v", "async"), ("v-half", "async"), ("zb-v", "batched"))
LAYERS = ("bf16", "fp8 delayed", "fp8 current", "fp8 blockwise", "mxfp8", "nvfp4")
REPLAYS = ("replay", "loops", "values", "offload")
SANITIZER = "TORCH_CUDA_SANITIZER"
# Factor on the time limits of cases: the CPU may be a laptop's, or may have other work.
PATIENCE = {"cuda": 1, "cpu": 3}


def parts(kind: str) -> dict[str, Part]:
    """Return the parts by name. ``kind`` is ``cuda``, or ``cpu`` for a rehearsal."""

    def case(seconds: float, module: str, *words: str, **environment: str) -> Case:
        name = " ".join((module.replace("_", " "), *words, *environment.values()))
        if kind == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""  # run on the CPU even if the machine has a GPU
            # torch's sanitizer is switched off, as it would query the current stream of a GPU.
            environment.pop(SANITIZER, None)
        words = (f"{_HERE}.{module}", kind, *words)
        # Oldest Python with which the case must run.
        python = (3, 9) if module == "host_calls" else (3, 12)
        return Case(name, words, PATIENCE[kind] * seconds, python, environment)

    def part(seconds: float, *cases: Case) -> Part:
        return Part(cases, PATIENCE[kind] * seconds)

    calls = (case(160 if name == "first_compiled" else 40, "host_calls", name) for name in CALLS)
    queues = (
        case(40, "host_calls", "queue", CUDA_DEVICE_MAX_CONNECTIONS=connections)
        for connections in ("1", "8")
    )
    steps = (case(60, "executor", "step", spec, "2", p2p) for spec, p2p in SCHEDULES)
    offloads = (case(80, "executor", "offload", spec, "2") for spec in ("gis", "zb-v"))
    transports = (case(80, "two_ranks", "step", spec, p2p) for spec, p2p in SCHEDULES)
    trial = case(60, "two_ranks", "trial")

    def trainings(layers: str, *schedules: tuple[str, str]) -> tuple[Case, ...]:
        return (
            case(150, "gpt", "reference", layers),
            case(110, "gpt", "stock", layers),
            *(case(110, "gpt", "schedule", layers, spec, p2p) for spec, p2p in schedules),
        )

    checked = {SANITIZER: "1"}
    experts = (case(110, "streams", "experts", "zb-h1", offload) for offload in ("none", "full"))
    streams = (
        case(60, "streams", "capture"),
        *experts,
        case(200, "streams", "experts", "zb-h1", "full", **checked),
        *(case(120, "two_ranks", "step", spec, "async", **checked) for spec in ("zb-h1", "zb-v")),
    )
    return {
        "calls": part(270, *calls, case(60, "host_calls", "gemm"), *queues),
        "executor": part(180, *steps, *offloads, case(60, "executor", "copies")),
        "nccl": part(170, trial, *transports),
        "gpt": part(480, trial, *trainings("local", *SCHEDULES)),
        "engine": part(
            480,
            trial,
            *trainings("engine", *SCHEDULES[:2]),
            *trainings("fp8", *SCHEDULES[:2]),
        ),
        "streams": part(480, trial, *streams),
        "graphs": part(
            200,
            *(
                case(110, "whole_iterations", way, spec)
                for spec in ("zb-h1", "zb-v")
                for way in ("eager", "graph")
            ),
        ),
        "layers": part(95, *(case(60, "layers", *precision.split()) for precision in LAYERS)),
        "rehearsal": part(530, *(case(270, "rehearsal", name) for name in ("line", "v", "truth"))),
        "replay": part(530, *(case(250, "rehearsal", name) for name in REPLAYS)),
    }
