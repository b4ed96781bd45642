"""Tests of the verdict on a checkpoint before a launch, compared with what the launch does.

The check of a launch command used to call any existing folder right, and `plan` said "can be
loaded", but launches ended in errors: the stages were on other ranks, in another number on each
rank, in another layout, or the learning-rate schedule differed. Now one function answers from the
checkpoint's own metadata. Some of its answers are compared with a launch by day, a whole table of
them at night.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.launch.command.launch_words import read_launch
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.doctor.launch_report import Finding, Severity
from tests.helpers.combinations import IS_NIGHT
from tests.helpers.megatron_runs import EXPERTS, SCRIPT, train_or_fail
from tests.helpers.trainings import Training

RESHARDABLE: dict[str, object] = {"dist_ckpt_optim_fully_reshardable": True}
VIRTUAL: dict[str, object] = {"num_virtual_stages_per_pipeline_rank": 2}
LAYOUT = "pipeline_model_parallel_layout"
OTHER_OPTIMIZER: dict[str, object] = {"use_distributed_optimizer": None}
BASE = Training(
    2,
    {
        "pipeline_model_parallel_size": 2,
        "train_iters": 2,
        "lr_decay_iters": 4,
        "global_batch_size": 4,
        "use_distributed_optimizer": True,
        "untie_embeddings_and_output_weights": True,
    },
)
SAVED: dict[str, dict[str, object]] = {
    "stock": {},
    "stock, 2 stages a rank": VIRTUAL,
    "zb-v": {"pipeline_schedule": "zb-v"},
    "layout": {LAYOUT: "Ettt|tL"},
    "not distributed": OTHER_OPTIMIZER,
    "experts": EXPERTS,
    "bf16": {"bf16": True},
}
LOADED: dict[str, dict[str, object]] = {
    "stock": {},
    "stock, 2 stages a rank": VIRTUAL,
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "interleaved-zb": {"pipeline_schedule": "interleaved-zb", **VIRTUAL},
    "zb-v": {"pipeline_schedule": "zb-v"},
    "layout": {LAYOUT: "Ettt|tL"},
    "even layout": {LAYOUT: "Ett|ttL"},
    "layout, 2 stages a rank": {LAYOUT: "Et|t|t|tL"},
    "PP 4": {"ranks": 4, "pipeline_model_parallel_size": 4},
    "TP 2": {"ranks": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "DP 2": {"ranks": 4},
    "zb-v, weights": {"pipeline_schedule": "zb-v", "no_load_optim": True},
    "PP 4, anew": {"ranks": 4, "pipeline_model_parallel_size": 4, "finetune": True},
    "hidden size": {"hidden_size": 64},
    "longer": {"train_iters": 3},
    "longer, overridden": {"train_iters": 3, "override_opt_param_scheduler": True},
    "learning rate": {"lr": 2e-2, "override_opt_param_scheduler": True},
    "vocabulary split": {"pipeline_schedule": "zb-h1", "pipeline_vocab_parallel": 1},
    "larger vocabulary": {"vocab_size": 200},
}
# Flags that change the model, the optimizer or the precision, each with the checkpoint that is
# loaded under them.
OTHERS: list[tuple[str, dict[str, object]]] = [
    ("stock", {"num_layers": 8}),
    ("stock", {"ffn_hidden_size": 64}),
    ("stock", {"num_attention_heads": 4}),
    ("stock", {"num_attention_heads": 4, "finetune": True}),
    ("stock", {"group_query_attention": True, "num_query_groups": 1}),
    ("stock", {"swiglu": True}),
    ("stock", {"qk_layernorm": True}),
    ("stock", {"normalization": "RMSNorm"}),
    ("stock", {"disable_bias_linear": True}),
    ("stock", {"position_embedding_type": "rope"}),
    ("stock", {"untie_embeddings_and_output_weights": None}),
    ("stock", {"bf16": True}),
    ("stock", EXPERTS),
    ("stock", {"ckpt_format": "torch"}),
    ("stock", {"weight_decay": 0.1}),
    ("stock", {"weight_decay": 0.1, "use_checkpoint_opt_param_scheduler": True}),
    ("stock", {"min_lr": 1e-3}),
    ("stock", {"overlap_grad_reduce": True, "ddp_bucket_size": 5000}),
    ("stock", {"overlap_grad_reduce": True}),
    ("stock", OTHER_OPTIMIZER),
    ("not distributed", {"use_distributed_optimizer": True}),
    ("not distributed", {"bf16": True}),
    ("bf16", {"bf16": None}),
    ("bf16", {"grad_reduce_in_bf16": True}),
    ("experts", {"ranks": 4, "expert_model_parallel_size": 2}),
    ("experts", {"num_experts": 8}),
    ("experts", {"moe_shared_expert_intermediate_size": 32}),
    ("experts", {"moe_layer_freq": "[1,1,1,1]"}),
    ("experts", {"ranks": 4}),
]
BY_DAY = (
    ("stock, 2 stages a rank", False, "layout, 2 stages a rank"),
    ("stock, 2 stages a rank", True, "zb-v"),
    ("zb-v", False, "stock, 2 stages a rank"),
    ("zb-v", False, "zb-v, weights"),
)


def cases() -> list[Any]:
    table = [
        (saved, flag, loaded) for saved in SAVED for flag in (False, True) for loaded in LOADED
    ]
    found = [
        (f"{saved}{' with the flag' * flag} - {loaded}", saved, flag, LOADED[loaded])
        for saved, flag, loaded in (table if IS_NIGHT else BY_DAY)
    ]
    found += [
        (f"{saved}{' with the flag' * flag} - {loaded}", saved, flag, loaded)
        for saved, loaded in (OTHERS if IS_NIGHT else ())
        for flag in (False, True)
    ]
    return [pytest.param(*case, id=name) for name, *case in found]


def words_of(saved: str, flag: bool, loaded: dict[str, object]) -> tuple[int, list[str]]:
    """Return the number of ranks and the flags of a launch that loads the checkpoint of
    ``saved``."""
    own = SAVED[saved]
    folder = BASE.but(**own).saved(**RESHARDABLE if flag else {})[1]
    model = {name: own[name] for name in ("bf16", *OTHER_OPTIMIZER, *EXPERTS) if name in own}
    flags = {**model, **loaded, "load": folder, "ckpt_step": 1, "exit_on_missing_checkpoint": True}
    ranks = flags.pop("ranks", BASE.ranks)
    assert isinstance(ranks, int)
    return ranks, BASE.words(**flags)


def judged(ranks: int, words: list[str]) -> Finding:
    """Return the finding on the checkpoint from the check of a launch command. Assert that no other
    finding is wrong."""
    ours = ["-m", "megatron_ext"] if "--pipeline-schedule" in words else []
    command = ["torchrun", "--nproc-per-node", str(ranks), *ours, str(SCRIPT), *words]
    report = check_launch(read_launch(command), None, None)
    (finding,) = [each for each in report.findings if each.subject == "checkpoints"]
    others = [each for each in report.findings if each.verdict is Severity.WRONG]
    assert [each for each in others if each is not finding] == []
    return finding


@pytest.mark.parametrize(("saved", "flag", "loaded"), cases())
def test_a_launch_does_what_was_said(saved: str, flag: bool, loaded: dict[str, object]) -> None:
    ranks, words = words_of(saved, flag, loaded)
    finding = judged(ranks, words)
    assert "not judged" not in finding.text, finding
    results = train_or_fail(ranks, words)
    trained = all(result.exit_code == 0 and result.value is not None for result in results)
    trained = trained and any(result.value.losses for result in results)
    assert trained == (finding.verdict is not Severity.WRONG), (finding, results[0].error[-500:])
    weights = "no_load_optim" in loaded or "finetune" in loaded
    assert not trained or ("loads weights only" if weights else "loads whole") in finding.text
    if not trained:
        assert finding.fix


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb"])
def test_a_launch_of_ours_says_it_in_one_line(schedule: str) -> None:
    """A launch under our schedule says in one line that a checkpoint does not fit. Each rank used
    to end with "Global shape mismatch" if the checkpoint has one stage on each rank and the launch
    two, or the reverse: a schedule that places its stages as Megatron does was not compared with
    the checkpoint."""
    saved = "stock, 2 stages a rank" if schedule == "zb-h1" else "stock"
    ranks, words = words_of(saved, False, LOADED[schedule])
    results = train_or_fail(ranks, words)
    assert all(result.error.endswith("SystemExit: 2\n") for result in results)
    (line,) = [text for text in results[0].stderr.splitlines() if "megatron_ext: error" in text]
    finding = judged(ranks, words)
    assert finding.text.partition(" does not load: ")[2] in line and finding.fix in line


def test_a_vocabulary_with_more_rows_is_remarked_on() -> None:
    """The check of a launch remarks on a vocabulary with more rows than the checkpoint has.
    Megatron loads the saved rows without a message, and the others stay random. With tensor
    parallelism, which pads to more rows, the loss of a continued training rose from 4.46 to
    5.15."""
    finding = judged(*words_of("stock", True, LOADED["TP 2"]))
    assert finding.verdict is Severity.REMARK and "loads whole" in finding.text
    assert "256 rows and the checkpoint 128" in finding.text
    ranks, words = words_of("stock", True, LOADED["TP 2"] | {"padded_vocab_size": 128})
    assert judged(ranks, words).verdict is Severity.RIGHT
