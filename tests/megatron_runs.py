"""Short trainings of a real GPT through Megatron's own loop, on forked ranks.

The script, the launcher and Megatron are the user's; only the ranks are forked from a parent that
has imported torch and Megatron, so that a run costs seconds.
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks, values

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"

# What ranks would otherwise each import for themselves. What is imported is then kept out of the
# garbage collector's sight: else every rank would copy its pages.
for _module in (
    "megatron.core.tokenizers.text",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.training.training",
):
    importlib.import_module(_module)
runpy.run_path(str(SCRIPT), run_name="imported")
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)


@dataclass
class Run:
    """What one rank of a training recorded.

    ``losses`` and ``norms`` are per iteration, bit for bit as floats; ``state`` maps each parameter
    and optimizer tensor to a digest of its bytes.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    schedule: str = ""
    evaluation: list[float] = field(default_factory=list)


def model_flags(**overrides: object) -> list[str]:
    """A GPT of 4 layers on mock data; an override of None drops a flag, of True is a switch."""
    flags: dict[str, object] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "lr": 1e-2,
        "train_iters": 5,
        "clip_grad": 0,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 63,
        "num_workers": 0,
        "eval_iters": 0,
        "eval_interval": 1000,
        "log_interval": 1,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "ckpt_format": "torch_dist",
        "use_cpu_initialization": True,
    }
    flags |= overrides
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(str(value))
    return words


def train(
    ranks: int,
    flags: Sequence[str],
    script: Path = SCRIPT,
    model_config: Mapping[str, object] | None = None,
) -> list[Run]:
    """Train on ``ranks`` ranks; fails unless every rank ends well and iterations were run.

    ``model_config`` is set on the model's config, for what has no flag.
    """
    port = _free_port()
    runs = values(
        run_ranks(
            ranks,
            lambda rank: _train_rank(rank, ranks, port, script, flags, model_config or {}),
            timeout=180,
            connect=False,
        )
    )
    assert any(run.losses for run in runs), "not one iteration was trained"
    return runs


def losses(runs: Sequence[Run]) -> list[float]:
    """The losses, which the last pipeline rank has."""
    return next(run.losses for run in runs if run.losses)


def _train_rank(
    rank: int,
    ranks: int,
    port: int,
    script: Path,
    flags: Sequence[str],
    model_config: Mapping[str, object],
) -> Run:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from megatron.core.utils import get_model_config
    from megatron.training import training

    from megatron_ext.launch import launch

    run = Run()
    made: list[Any] = []
    setup, log, evaluate = (
        training.setup_model_and_optimizer,
        training.training_log,
        training.evaluate,
    )

    def record_setup(*args: Any, **kwargs: Any) -> Any:
        made[:] = result = setup(*args, **kwargs)
        for name, value in model_config.items():
            setattr(get_model_config(made[0][0]), name, value)
        return result

    def record_log(loss_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if "lm loss" in loss_dict:
            run.losses.append(_loss(loss_dict["lm loss"]))
        run.norms.append(float(args[6]) if args[6] is not None else 0.0)
        return log(loss_dict, *args, **kwargs)

    def record_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0]:
            run.evaluation += [_loss(loss) for loss in result[0].values()]
        return result

    training.setup_model_and_optimizer = record_setup
    training.training_log = record_log
    training.evaluate = record_evaluate
    try:
        launch([str(script), *flags])
    except SystemExit as end:  # --exit-interval
        if end.code:
            raise
    run.state = _digests(made[0], made[1])
    schedule = sys.modules["megatron.core.pipeline_parallel"].get_forward_backward_func()
    run.schedule = getattr(schedule, "__name__", type(schedule).__name__)
    return run


def _loss(value: Any) -> float:
    """A reduced loss as Megatron logs it: a tensor, or a sum with its count."""
    if isinstance(value, torch.Tensor) and value.numel() == 2:
        return float(value[0] / value[1])
    return float(value)


def _digests(model: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, str]:
    tensors = {
        f"{index}.{name}": parameter.data
        for index, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }
    for number, inner in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for group_number, group in enumerate(inner.optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                key = f"optimizer {number}.{group_number}.{index}"
                tensors[key] = parameter.data
                for name, value in inner.optimizer.state[parameter].items():
                    tensors[f"{key}.{name}"] = torch.as_tensor(value)
    return {
        name: hashlib.sha256(
            tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if tensor.dim()
            else repr(tensor.item()).encode()
        ).hexdigest()
        for name, tensor in tensors.items()
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
