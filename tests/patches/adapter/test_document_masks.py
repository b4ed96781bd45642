"""Tests of attention masks of documents, which training scripts give to the first and the last
stage only.

With --reset-attention-mask and layers that apply the mask, zb-v on two ranks used to have other
losses than stock's 1F1B, without a message: inner stages of the V attended across the ends of
documents. Stock's own virtual stages and longer pipelines do the same, which `doctor` says.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.fusions import fused_softmax
from megatron.core.transformer.enums import AttnMaskType

from megatron_ext.adapter.compatibility import refuse
from megatron_ext.adapter.document_masks import masks_are_applied
from megatron_ext.bridge import _Settings
from megatron_ext.compile.registry import choose
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.doctor.check import check_launch
from megatron_ext.launch.doctor.launch_report import Finding, Severity
from tests.helpers.megatron_runs import SCRIPT, model_flags

LOCAL: dict[str, object] = {
    "transformer_impl": "local",
    "num_attention_heads": 8,
    "tensor_model_parallel_size": 1,
    "micro_batch_size": 1,
    "seq_length": 2048,
    "masked_softmax_fusion": True,
    "bf16": True,
    "create_attention_mask_in_dataloader": True,
}

APPLIED: dict[str, dict[str, object]] = {
    "fp32": {"bf16": False},
    "no fusion": {"masked_softmax_fusion": False},
    "long": {"seq_length": 8192},
    "not a multiple of four": {"seq_length": 2046},
    "heads of a rank": {"tensor_model_parallel_size": 4},
    "short, heads of a block": {"seq_length": 128, "tensor_model_parallel_size": 2},
    "sinks": {"softmax_type": "learnable"},
    "some windows": {"window_size": (128, 0), "window_attn_skip_freq": 2, "bf16": False},
}
IGNORED: dict[str, dict[str, object]] = {
    "fused": {},
    "fused, fp16": {"bf16": False, "fp16": True},
    "Transformer Engine": {"transformer_impl": "transformer_engine", "bf16": False},
    "no mask": {"create_attention_mask_in_dataloader": False, "bf16": False},
    "windows alone": {"window_size": (128, 0), "bf16": False},
}


@pytest.mark.parametrize("case", [*APPLIED, *IGNORED])
def test_which_layers_apply_masks(case: str) -> None:
    settings = SimpleNamespace(**(LOCAL | (APPLIED | IGNORED)[case]))
    assert masks_are_applied(settings) == (case in APPLIED)


@pytest.mark.parametrize("tokens", [12, 16, 20, 22, 128, 132, 4096, 4100])
@pytest.mark.parametrize("heads", [1, 2, 4, 6, 8])
def test_the_fused_kernel_is_taken_as_megatron_takes_it(
    tokens: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our check expects the fused softmax kernel, which ignores document masks, exactly when
    Megatron would use it. Megatron gets the rows per block from its compiled extension; a Python
    function with the same formula stands in for that call here."""
    softmax = fused_softmax.FusedScaleMaskSoftmax(
        False, True, AttnMaskType.causal, True, lambda x, mask: x, True, None
    )

    # This is the number of rows of a block as Megatron's scaled_masked_softmax.h computes it.
    def rows_of_a_block(sq: int, sk: int, b: int, np: int) -> int:
        elements = 1 << (sk - 1).bit_length()
        return 128 // min(elements, 32) * (2 if elements <= 128 else 1)

    monkeypatch.setattr(softmax, "get_batch_per_block", rows_of_a_block)
    is_fused = softmax.is_kernel_available(None, 1, heads, tokens, tokens)
    settings = SimpleNamespace(**(LOCAL | {"seq_length": tokens, "num_attention_heads": heads}))
    assert masks_are_applied(settings) == (not is_fused)


@pytest.mark.parametrize(
    "schedule", ["zb-v", "v-half", "interleaved", "interleaved-zb", "dualpipe-v", "wave-auto"]
)
def test_schedules_with_virtual_stages_refuse_it(schedule: str) -> None:
    resolved = choose(schedule)
    settings = SimpleNamespace(
        **(LOCAL | APPLIED["fp32"]),
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=resolved.place(2).chunks,
        reset_attention_mask=True,
    )
    with pytest.raises(ValueError, match=r"reset_attention_mask=True: .*-inter-document-masking"):
        refuse(settings, resolved)
    settings.reset_attention_mask = False
    settings.reset_position_ids = settings.eod_mask_loss = True
    refuse(settings, resolved)
    # With bf16 Megatron's layers use the fused softmax kernel, which ignores the mask.
    settings.reset_attention_mask = settings.bf16 = True
    refuse(settings, resolved)


def test_bridges_dataset_is_looked_at() -> None:
    """A Megatron-Bridge config with reset_attention_mask in its dataset is refused under zb-v."""
    parts = dict.fromkeys(
        ("ddp", "optimizer", "dist", "checkpoint", "train", "validation", "logger", "rng")
    )
    model = SimpleNamespace(
        **(LOCAL | APPLIED["fp32"]), pipeline_model_parallel_size=2, tensor_model_parallel=1
    )
    dataset = SimpleNamespace(reset_attention_mask=True, create_attention_mask=True)
    config = SimpleNamespace(**parts, comm_overlap=None, dataset=dataset)
    with pytest.raises(ValueError, match="reset_attention_mask=True"):
        refuse(_Settings(config, model, 2), choose("zb-v"))
    dataset.create_attention_mask = False
    refuse(_Settings(config, model, 2), choose("zb-v"))


def masks(**overrides: object) -> list[Finding]:
    sizes = {"num_layers": 8, "pipeline_model_parallel_size": 4, "reset_attention_mask": True}
    words = model_flags(**(sizes | {"transformer_impl": "local"} | overrides))
    report = check_launch(Launch(str(SCRIPT), False, (*words,)), 4, None)
    return [
        finding
        for finding in report.findings
        if "documents" in finding.text and finding.verdict is not Severity.RIGHT
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"pipeline_schedule": "zb-h1"},
        {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    ],
    ids=["a line of stock's", "a line of ours", "virtual stages of stock's"],
)
def test_doctor_remarks_on_what_stock_does_too(
    overrides: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = masks(**overrides)
    assert finding.verdict is Severity.REMARK
    assert "2 stages of 4 tokens attend to other documents" in finding.text
    assert "--dataloader-inter-document-masking" in finding.fix


@pytest.mark.parametrize(
    "overrides",
    [
        {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"},
        {"transformer_impl": "transformer_engine", "pipeline_schedule": "zb-v"},
        {"reset_attention_mask": None, "reset_position_ids": True, "eod_mask_loss": True},
    ],
    ids=["two ranks", "Transformer Engine", "no mask"],
)
def test_doctor_says_nothing_where_documents_stay_apart_or_no_mask_is_read(
    overrides: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not masks(**overrides)
