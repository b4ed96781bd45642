"""Trainings that papers describe: models, and how a rank runs them.

They are those of Korthikanti et al. (2022, arXiv:2205.05198, table 5), the Llama 3 paper (2024,
arXiv:2407.21783, table 4), the Nemotron-4 340B report (2024, arXiv:2406.11704, table 2) and the
DeepSeek-V3 report (2024, arXiv:2412.19437, sections 1, 3.1, 3.2 and 4.2), whose 16 stages have four
layers each, as in its published profile of overlapped passes. No measurement of these papers was
used to choose a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.gpus import DATA_SHEETS, GPUS, Gpu
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState, default_bucket
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.work import Work
from scripts.evaluation.measured import PublishedStep

# An H800 is an H100 whose NVLink has 400 GB/s, 200 in each direction. 20 of its 132 SMs run only
# DeepSeek's messages (section 3.2.2).
_COMPUTE = (132 - 20) / 132
_H100 = DATA_SHEETS["h100"]
_H800 = replace(_H100, peers=200e9, sms=112, bf16=_COMPUTE * _H100.bf16, fp8=_COMPUTE * _H100.fp8)
_GPUS = GPUS | {"h800": Gpu(_H800.memory, _H800)}


def _gpt3(layers: int, hidden_size: int, heads: int) -> Model:
    text = (
        f"layers={layers},hidden={hidden_size},heads={heads},"
        "sequence=2048,vocabulary=51200,tied=true"
    )
    return replace(
        parse_model(text).model,
        normalization="LayerNorm",
        add_bias_linear=True,
        is_rotary=False,
        max_position_embeddings=2048,
    )


_LLAMA = parse_model(
    "layers=126,hidden=16384,heads=128,kv-heads=8,ffn=53248,gated=true,sequence=8192,"
    "vocabulary=128256"
).model
_NEMOTRON = parse_model(
    "layers=96,hidden=18432,heads=96,kv-heads=8,ffn=73728,sequence=4096,vocabulary=256000"
).model
_DEEPSEEK = Model(
    layers=("*-",) * 3 + ("*E",) * 58,
    hidden_size=7168,
    num_attention_heads=128,
    num_query_groups=128,
    kv_channels=128,
    ffn_hidden_size=18432,
    vocabulary=129280,
    gated_linear_unit=True,
    untie_embeddings_and_output_weights=True,
    qk_layernorm=True,
    normalization="RMSNorm",
    multi_latent_attention=True,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
    num_experts=256,
    moe_router_topk=8,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    mtp_num_layers=1,
    mtp_layer="*E",
)
# The trainings of the paper on sequence parallelism and selective recompute used no flash
# attention, and recomputed the attention matrix, with dropout.
_SELECTIVE = Execution(
    2048,
    tensor_parallel=8,
    transformer_engine=False,
    recompute_modules=frozenset({"core_attn"}),
)
_WITHOUT_DROPOUT = replace(
    Execution(8192, tensor_parallel=8), hidden_dropout=0, attention_dropout=0
)
# DeepSeek-V3 sends each token to a node once, and on over NVLink. Its paper says that messages are
# "fully hidden" within overlapped passes.
_IN_PAIRS = Execution(
    4096,
    expert_parallel=64,
    sequence_parallel=False,
    precision=Precision.FP8,
    recompute_modules=frozenset({"layernorm", "mla_up_proj"}),
    hidden_dropout=0.0,
    attention_dropout=0.0,
    dispatcher="flex",
    overlap=1.0,
)
# The paper does not give Llama's virtual stages: four on each rank are assumed.
_LLAMA_LAYERS = (1, *[2] * 62, 1)


@dataclass(frozen=True)
class PaperTraining:
    """A training that a paper describes. Its microbatches have one sample.

    Attributes:
        gpu: name of the GPU.
        pipeline: number of pipeline ranks.
        layers: number of layers of each stage.
        schedule: spec of the schedule.
    """

    model: Model
    execution: Execution
    gpu: str
    pipeline: int
    layers: tuple[int, ...]
    schedule: str


# Trainings of papers, by the job that their rows name.
PAPERS = {
    "korthikanti GPT-3 175B": PaperTraining(
        _gpt3(96, 12288, 96), _SELECTIVE, "a100", 8, (4,) * 24, "interleaved:vpp=3"
    ),
    "korthikanti MT-NLG 530B": PaperTraining(
        _gpt3(105, 20480, 128), _SELECTIVE, "a100", 35, (1,) * 105, "interleaved:vpp=3"
    ),
    "korthikanti 1T": PaperTraining(
        _gpt3(128, 25600, 160), _SELECTIVE, "a100", 64, (2,) * 64, "1f1b"
    ),
    "paper Llama 3 405B": PaperTraining(
        _LLAMA, _WITHOUT_DROPOUT, "h100", 16, _LLAMA_LAYERS, "interleaved:vpp=4"
    ),
    "paper Nemotron-4 340B": PaperTraining(
        _NEMOTRON,
        replace(_WITHOUT_DROPOUT, sequence=4096),
        "h100",
        12,
        (1,) * 96,
        "interleaved:vpp=8",
    ),
    # DualPipe runs on 16 ranks, which hold two copies of the model; it is described here as one
    # copy on 8 ranks with twice the data parallelism. Multi-token prediction is on the last stage.
    "dsv3 h800": PaperTraining(_DEEPSEEK, _IN_PAIRS, "h800", 8, (*[4] * 15, 1), "dualpipe-v"),
}


def work_of(paper: PaperTraining, step: PublishedStep) -> Work:
    """Return the estimated work of ``paper`` with the number of GPUs and the batch of ``step``."""
    execution = replace(paper.execution, pipeline_span=step.gpus)
    copies, experts = copies_of(paper, step), execution.expert_parallel
    state = TrainingState(
        distributed=True,
        data_parallel=copies,
        expert_data_parallel=copies // experts,
        # In all these trainings gradient reductions overlap passes, or there is one replica.
        bucket=default_bucket(copies),
    )
    work = estimated_work(
        paper.model,
        execution,
        state,
        _GPUS[paper.gpu].rates(execution.precision),
        ranks=paper.pipeline,
        microbatches=step.size("gbs") // copies,
    )
    return replace(work, pairs=execution.overlap > 0)


def copies_of(paper: PaperTraining, step: PublishedStep) -> int:
    """Return the number of data-parallel ranks of the published step."""
    return step.gpus // (paper.execution.tensor_parallel * paper.pipeline)
