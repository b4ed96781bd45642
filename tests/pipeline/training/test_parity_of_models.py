"""Tests of the command `megatron-ext parity` on models of every kind: stock compared with our
schedules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.combinations import nightly
from tests.helpers.documents import check_written, table
from tests.helpers.hybrid import DELTA_NET
from tests.helpers.megatron_runs import SCRIPT, model_flags
from tests.pipeline.training.test_multi_token_prediction import EXPERTS, REPEATED, UNTIED
from tests.pipeline.training.test_packed_sequences import CONVERSATIONS
from tests.pipeline.training.test_recipe_settings import MLA

ROOT = Path(__file__).parents[3]
ANY = ROOT / "tests" / "pipeline" / "scripts" / "pretrain_any_model.py"
ITERATIONS = 2
Flags = dict[str, object]


@dataclass(frozen=True)
class Model:
    """Model that a launch command trains, and the schedule that is compared with stock.

    Attributes:
        stand_in: names the part of the model that is replaced on the CPU.
        trained: trained parts, in the words of the script ``ANY``; "" for all.
        is_saved: both runs load a checkpoint that the command writes; otherwise ``ANY`` draws
            weights by their names.
    """

    flags: Flags
    schedule: str
    script: Path = SCRIPT
    ranks: int = 2
    stand_in: str = ""
    trained: str = ""
    is_saved: bool = True

    def command(self) -> list[str]:
        flags = model_flags(
            **{
                "pipeline_model_parallel_size": 2,
                "num_layers": 8,
                "position_embedding_type": "rope",
                "train_iters": 9,
                "pipeline_schedule": self.schedule,
                **self.flags,
            }
        )
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(self.ranks)]
        variables = ["env", f"TRAINED={self.trained}"] if self.trained else []
        return [*variables, *launcher, str(self.script), *flags]


LINEAR: Flags = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    **DELTA_NET,
}
HYBRID: Flags = {"num_layers": None, "hybrid_layer_pattern": "*E*-*E*-"}
MODELS: dict[str, Model] = {
    "tied": Model({}, "interleaved-zb"),
    "untied, bf16": Model({**UNTIED, "bf16": True}, "zb-h1"),
    "untied, multi-token prediction": Model({**UNTIED, "mtp_num_layers": 1}, "zb-v"),
    "untied, multi-token prediction of 2 depths": Model({**UNTIED, "mtp_num_layers": 2}, "zb-h1"),
    "untied, multi-token prediction, repeated layer": Model(
        {**UNTIED, **REPEATED}, "interleaved-zb"
    ),
    "tied, multi-token prediction, `--from-seed`": Model(
        {"mtp_num_layers": 1}, "zb-v", ANY, is_saved=False
    ),
    "experts, EP 2": Model({**UNTIED, **EXPERTS, "expert_model_parallel_size": 2}, "zb-v", ranks=4),
    "multi-latent attention": Model({**UNTIED, **MLA}, "zb-v", ANY, stand_in="its core"),
    "packed sequences (`--sft`)": Model(
        {**UNTIED, **CONVERSATIONS, "eval_iters": 1},
        "zb-v",
        ANY,
        stand_in="attention, the conversations",
    ),
    "linear attention": Model(
        {**UNTIED, **LINEAR}, "zb-v", ANY, stand_in="the delta rule's kernel"
    ),
    "HybridModel, `*-E`": Model(
        {**UNTIED, **EXPERTS, **HYBRID}, "zb-v", ANY, stand_in="Transformer Engine's layers"
    ),
    "low-rank adapters": Model(
        UNTIED, "zb-v", ANY, stand_in="Megatron-Bridge's modules", trained="adapters"
    ),
    "frozen first layers, `--from-seed`": Model(
        UNTIED, "zb-h1", ANY, trained="upper-layers", is_saved=False
    ),
}


@nightly("the tests of each kind compare forked ranks, which start in a tenth of the time")
@pytest.mark.parametrize("name", MODELS)
def test_a_command_is_stocks(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    options = ["--json", "--iterations", str(ITERATIONS)]
    if not model.is_saved:
        options.append("--from-seed")
    words = ["-m", "megatron_ext", "parity", *options, "--", *model.command()]
    result = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["verdict"] == "same"
    assert min(found["compared"].values()) > 0
    assert found["settings"]["--pipeline-schedule"] == [None, model.schedule]


def test_the_table_of_models() -> None:
    rows = [[name, model.schedule, model.stand_in] for name, model in MODELS.items()]
    check_written("models", table(["model", "schedule", "stand-in for"], rows), page="parity.md")
