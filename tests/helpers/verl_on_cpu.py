"""verl's own training under several schedules, each on forked ranks of a process that has imported
verl's requirements: ``python -m tests.helpers.verl_on_cpu FOLDER BRIDGE TRAINING...``

A training is the name of a schedule, or ``stock`` for Megatron's own. SCHEDULE:shared computes
prompts once, as in examples/verl_shared_prompts.py. SCHEDULE:saved also writes a checkpoint after
the first step, and SCHEDULE:OTHER begins with the second, from the checkpoint of ``OTHER:saved``.
FOLDER gets a small model and a file of results for each training.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.helpers import megatron_runs
from tests.helpers.launched_script import printed_by_ranks
from tests.helpers.stand_ins import OF_BRIDGE, stand_ins

SCRIPT = Path(__file__).with_name("verl_actor.py")
LAYERS = 8
PLATFORM = "tests.helpers.verl_platform"

# Packages of verl's imports, which are imported before ranks are forked. Each rank imports verl
# itself, as verl reads variables at its import.
_IMPORTED = (
    "datasets",
    "hydra",
    "mbridge",
    "peft",
    "ray",
    "tensordict",
    "torchdata",
    "transformers",
)


def write_model(folder: Path, **settings: Any) -> None:
    """Write a Qwen2 with random weights, or a Qwen3 with experts, and its tokenizer, as files like
    those of a model downloaded from Hugging Face."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    torch.manual_seed(0)
    family = "Qwen3Moe" if "num_experts" in settings else "Qwen2"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **{"tie_word_embeddings": False, **settings},
    )
    getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().save_pretrained(folder)
    words = {str(token): token for token in range(config.vocab_size)}
    model = tokenizers.models.WordLevel(words, unk_token="0")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        **{"unk_token": "0", "pad_token": "0", "eos_token": "1", "bos_token": "2"},
    ).save_pretrained(folder)


def train(folder: Path, bridge: str, training: str, ranks: int, overrides: list[str]) -> str:
    """Train, and return everything that the ranks printed; the results are in a file of
    ``folder``."""
    schedule, _, source = training.partition(":")
    saves, loads = source == "saved", source not in ("", "saved", "shared")
    variables = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": PLATFORM,
        "VERL_ENGINE_DEVICE": "cuda",  # verl's engines are registered for CUDA
        "HF_HUB_OFFLINE": "1",
        "VERL_ACTOR": json.dumps(
            {
                "model": str(folder / "model"),
                "bridge": bridge,
                "result": str(folder / f"{training}.json"),
                "overrides": overrides,
                "answers": int(os.environ.get("VERL_ANSWERS", "0")),
                "save": str(folder / f"{schedule}.checkpoint") if saves else None,
                "load": str(folder / f"{source}.checkpoint") if loads else None,
                "first": int(loads),
            }
        ),
    }
    if schedule != "stock":
        variables |= {
            "VERL_USE_EXTERNAL_MODULES": f"megatron_ext.auto,{PLATFORM}",
            "MEGATRON_EXT_SCHEDULE": schedule,
        }
    if source == "shared":
        variables |= {
            "VERL_USE_EXTERNAL_MODULES": f"megatron_ext.auto,{PLATFORM},verl_shared_prompts",
            "MEGATRON_EXT_SHARED_PROMPTS": "exact",
            "ANSWERS": os.environ["VERL_ANSWERS"],
        }
    return printed_by_ranks(SCRIPT, ranks, variables)


def run(folder: str, bridge: str, *trainings: str) -> None:
    # The import of megatron_runs does work once that each rank would repeat.
    assert megatron_runs.SCRIPT.exists()
    for name in _IMPORTED:
        importlib.import_module(name)
    if bridge == "megatron-bridge":
        with stand_ins(*OF_BRIDGE, "torch.utils.tensorboard"):
            for name in ("config", "utils.train_utils", "utils.config_utils"):
                importlib.import_module(f"megatron.bridge.training.{name}")
    write_model(Path(folder) / "model", **json.loads(os.environ.get("VERL_MODEL", "{}")))
    overrides = os.environ.get("VERL_OVERRIDES", "").split()
    ranks = int(os.environ.get("VERL_RANKS", "2"))
    for training in trainings:
        print(train(Path(folder), bridge, training, ranks, overrides))


if __name__ == "__main__":
    run(*sys.argv[1:])
