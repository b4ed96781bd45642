"""ms-swift's own fine-tuning under several schedules, each on forked ranks of a process that has
imported ms-swift: ``python -m tests.helpers.swift_on_cpu FOLDER TRAINING...``

A training is the name of a schedule, or ``stock`` for Megatron's own. FOLDER gets a small model,
its data and, for each training, a file of results for each rank. Layers are Transformer Engine's
own Python classes (`transformer_engine_on_cpu`) with Megatron's own attention.
"""

from __future__ import annotations

import importlib
import json
import os
import string
import sys
from pathlib import Path
from random import Random
from typing import Any

from tests.helpers import megatron_runs
from tests.helpers.launched_script import printed_by_ranks
from tests.helpers.packed import by_sequence
from tests.helpers.stand_ins import stand_ins
from tests.helpers.transformer_engine_gpt import use_transformer_engine
from tests.helpers.verl_on_cpu import write_model

SCRIPT = Path(__file__).with_name("swift_sft.py")
CHARACTERS = string.digits + string.ascii_letters + "-+"
PLUGIN = "import megatron_ext.auto\n"


def write_tokenizer(model: Path) -> None:
    """Write a tokenizer for ``model`` that turns each character into a token, as Qwen's reads
    bytes."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    vocabulary = {character: token for token, character in enumerate(CHARACTERS)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [])),
        **{"unk_token": "0", "pad_token": "0", "eos_token": "1", "bos_token": "2"},
    ).save_pretrained(model)


def write_conversations(path: Path, number: int, seed: int) -> None:
    """Write conversations of random characters and different lengths."""
    rng = Random(seed)

    def words(most: int) -> str:
        return "".join(rng.choices(CHARACTERS[3:], k=rng.randrange(2, most)))

    with path.open("w") as file:
        for _ in range(number):
            messages = [
                {"role": "user", "content": words(8)},
                {"role": "assistant", "content": words(12)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def arguments(folder: Path, training: str, changes: dict[str, str]) -> list[str]:
    """Return the command line of ``megatron sft``, without fusions that need a GPU."""
    settings = {
        "model": str(folder / "model"),
        "model_type": "qwen2",
        "template": "dummy",
        "dataset": str(folder / "train.jsonl"),
        "val_dataset": str(folder / "val.jsonl"),
        "load_from_cache_file": "false",
        "dataset_num_proc": "1",
        "dataloader_num_workers": "0",
        "output_dir": str(folder / training),
        "add_version": "false",
        "check_model": "false",
        "ddp_backend": "gloo",
        "max_length": "32",
        "micro_batch_size": "1",
        "global_batch_size": "6",
        "train_iters": "3",
        "eval_steps": "2",
        "eval_iters": "2",
        "save_steps": "3",
        "save_safetensors": "false",
        "logging_steps": "1",
        "lr": "1e-2",
        "pipeline_model_parallel_size": "2",
        "masked_softmax_fusion": "false",
        "bias_dropout_fusion": "false",
        "bias_activation_fusion": "false",
        "cross_entropy_loss_fusion": "false",
        "gradient_accumulation_fusion": "false",
        **changes,
    }
    if training != "stock":
        settings["external_plugins"] = str(folder / "pipeline_schedule.py")
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def train(folder: Path, training: str, ranks: int, changes: dict[str, str]) -> str:
    """Train, and return everything that the ranks printed; the results are in files of
    ``folder``."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "USE_HF": "1",
        "SWIFT_SFT": json.dumps(
            {
                "arguments": arguments(folder, training, changes),
                "result": str(folder / f"{training}.json"),
            }
        ),
    }
    if training != "stock":
        variables["MEGATRON_EXT_SCHEDULE"] = training
    return printed_by_ranks(SCRIPT, ranks, variables)


def import_swift() -> None:
    """Import ms-swift in a process in which Megatron finds Transformer Engine's classes."""
    # The import of megatron_runs does work once that each rank would repeat.
    assert megatron_runs.SCRIPT.exists()
    use_transformer_engine("2.20.2")
    sys.path.insert(0, "")  # the launcher will replace the first entry by the script's folder
    attention: Any = importlib.import_module("megatron.core.transformer.dot_product_attention")
    provider: Any = importlib.import_module(
        "megatron.core.extensions.transformer_engine_spec_provider"
    )
    attention.DotProductAttention.forward = by_sequence(attention.DotProductAttention.forward)
    provider.TEDotProductAttention = attention.DotProductAttention
    importlib.reload(importlib.import_module("megatron.core.models.gpt.gpt_layer_specs"))
    # ms-swift needs the real einops, not the stand-in of transformer_engine_on_cpu.
    for name in ("einops",):
        sys.modules.pop(name, None)
    with stand_ins("trl"):
        importlib.import_module("swift.megatron")
        importlib.import_module("swift.megatron.pipelines")
        importlib.import_module("swift.megatron.trainers")


def run(folder: str, *trainings: str) -> None:
    import_swift()
    home = Path(folder)
    write_model(home / "model")
    write_tokenizer(home / "model")
    write_conversations(home / "train.jsonl", 24, seed=1)
    write_conversations(home / "val.jsonl", 12, seed=2)
    (home / "pipeline_schedule.py").write_text(PLUGIN)
    changes = json.loads(os.environ.get("SWIFT_ARGUMENTS", "{}"))
    ranks = int(os.environ.get("SWIFT_RANKS", "2"))
    for training in trainings:
        print(train(home, training, ranks, changes))


if __name__ == "__main__":
    run(*sys.argv[1:])
