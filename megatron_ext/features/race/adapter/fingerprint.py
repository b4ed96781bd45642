"""Fingerprint of a race: what is timed and on which machine, for its report and the next start.

A race may take more iterations than a job runs, so its measurements are stored for the next start.
The measurements count there only if the same thing is timed on the same machine: versions, model,
sizes and flags are compared by readable names, so that a refusal can say what differs.
"""

from __future__ import annotations

import sys
from typing import Any

import megatron.core
import torch
import torch.distributed as dist

from megatron_ext.adapter.step.call import Call
from megatron_ext.compile.feature_settings import setting_of
from megatron_ext.config import PipelineConfig, flag_with_value


def run_fingerprint(call: Call, ours: PipelineConfig) -> dict[str, str]:
    """Return the machine, versions, model and sizes of a run with ``call``, by readable names."""
    return {
        "GPU": f"{dist.get_world_size()} x {_device()}",
        "torch": str(torch.__version__),
        # Megatron's version is compared without the commit of the git repository around it.
        "Megatron": megatron.core.__version__.partition("+")[0],
        "TE": str(getattr(sys.modules.get("transformer_engine"), "__version__", "none")),
        # The version of megatron_ext is read from sys.modules, since the package itself imports
        # this module.
        "megatron_ext": sys.modules["megatron_ext"].__version__,
        "model": _model(call.config),
        "sizes": ", ".join([*_sizes(call), *_settings(ours)]),
    }


def _device() -> str:
    if torch.device(torch.cuda.current_device()).type != "cuda":
        return "CPU (no GPU)"
    return torch.cuda.get_device_name()


def _model(config: Any) -> str:
    words = [f"{config.num_layers} layers", f"hidden {config.hidden_size}"]
    if experts := getattr(config, "num_moe_experts", None):
        words.append(f"{experts} experts")
    words.append("bf16" if config.bf16 else "fp16" if config.fp16 else "fp32")
    return ", ".join(words)


def _sizes(call: Call) -> list[str]:
    chunks = len(call.models)
    words = [f"PP {call.pipeline.size()}" + (f" x {chunks} chunks" if chunks > 1 else "")]
    words += [
        f"{name} {size}"
        for name, size in (
            ("TP", call.config.tensor_model_parallel_size),
            ("CP", call.context_parallel_size),
            ("EP", getattr(call.config, "expert_model_parallel_size", 1)),
        )
        if size > 1
    ]
    return [
        *words,
        f"{call.num_microbatches} microbatches of {call.micro_batch_size} x {call.seq_length}",
    ]


def _settings(ours: PipelineConfig) -> list[str]:
    """Return the flags that change what a race times, without those that have their default."""
    names = [*map(setting_of, ours.options.requested)]
    if ours.memory_limit is not None:
        names.insert(0, "memory_limit")
    return [flag_with_value(name, getattr(ours, name)) for name in names]
