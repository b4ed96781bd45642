"""Predicted over published seconds of a step, as papers describe the trainings.

    python -m scripts.published_steps

The figures of Korthikanti et al. (2022, arXiv:2205.05198, table 5), the Llama 3 paper (2024,
arXiv:2407.21783, table 4), the Nemotron-4 340B report (2024, arXiv:2406.11704, table 2) and the
DeepSeek-V3 report (2024, arXiv:2412.19437, sections 1, 3.1, 3.2 and 4.2). None of these has been
used to choose a constant of the estimate.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.gpus import DATA_SHEETS, GPUS, Gpu
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.model_memory import TrainingState, default_bucket
from megatron_ext.cost_model.short_form import parse_model
from megatron_ext.planner.layouts.estimated import estimated_work
from megatron_ext.planner.layouts.layout import Layout
from megatron_ext.planner.layouts.work import Work, evaluate
from megatron_ext.schedule.action import Kind

# An H800 is an H100 whose NVLink has 400 GB/s, 200 one way. 20 of its 132 SMs have nothing but
# DeepSeek's messages to do (section 3.2.2).
_COMPUTE = (132 - 20) / 132
_H100 = DATA_SHEETS["h100"]
_H800 = replace(_H100, peers=200e9, sms=112, bf16=_COMPUTE * _H100.bf16, fp8=_COMPUTE * _H100.fp8)
_GPUS = GPUS | {"h800": Gpu(_H800.memory, _H800)}


def _gpt3(layers: int, hidden: int, heads: int) -> Model:
    text = f"layers={layers},hidden={hidden},heads={heads},sequence=2048,vocabulary=51200,tied=true"
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
# Before flash attention, whose matrix these trainings recomputed, and with dropout.
_SELECTIVE = Execution(
    2048,
    tensor_parallel=8,
    transformer_engine=False,
    recompute_modules=frozenset({"core_attn"}),
)
_WITHOUT_DROPOUT = replace(
    Execution(8192, tensor_parallel=8), hidden_dropout=0, attention_dropout=0
)
# Each token goes once to a node and on over NVLink. Messages are "fully hidden" within pairs.
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
# Seconds of a pair of 4 layers each on these H800s, from the first kernel to the last of
# train.json in https://github.com/deepseek-ai/profile-data.
PAIR = 0.129
# Llama's virtual stages are not published: four on each rank are assumed.
_LLAMA_LAYERS = (1, *[2] * 62, 1)


@dataclass(frozen=True)
class Training:
    """A published training with microbatches of one sample.

    Attributes:
        gpu: name of a GPU.
        pipeline: number of pipeline ranks.
        layers: layers of each stage.
        batch: samples of a step.
        seconds: published seconds of a step.
        schedule: spec of the schedule; empty: Megatron's own, without pairs.
    """

    name: str
    model: Model
    execution: Execution
    gpu: str
    gpus: int
    pipeline: int
    layers: tuple[int, ...]
    batch: int
    seconds: float
    schedule: str = ""

    @property
    def copies(self) -> int:
        """Number of data-parallel ranks."""
        return self.gpus // (self.execution.tensor_parallel * self.pipeline)


def _llama_seconds(gpus: int, batch: int, flops: float) -> float:
    """Return the seconds of a step of Llama 3 405B that reaches ``flops`` a second on each GPU.

    A token takes 6 operations for each parameter, and those of causal attention.
    """
    tokens = batch * 8192
    a_token = 6 * 405.9e9 + 6 * 126 * 16384 * 8192
    return a_token * tokens / gpus / flops


TRAININGS = (
    Training("GPT 175B", _gpt3(96, 12288, 96), _SELECTIVE, "a100", 64, 8, (4,) * 24, 64, 13.75),
    Training(
        "GPT 530B", _gpt3(105, 20480, 128), _SELECTIVE, "a100", 280, 35, (1,) * 105, 280, 37.83
    ),
    Training("GPT 1T", _gpt3(128, 25600, 160), _SELECTIVE, "a100", 512, 64, (2,) * 64, 512, 71.49),
    *(
        Training(
            "Llama 3 405B",
            _LLAMA,
            _WITHOUT_DROPOUT,
            "h100",
            gpus,
            16,
            _LLAMA_LAYERS,
            2048,
            _llama_seconds(gpus, 2048, flops),
        )
        for gpus, flops in ((8192, 430e12), (16384, 400e12))
    ),
    *(
        Training(
            "Nemotron-4 340B",
            _NEMOTRON,
            replace(_WITHOUT_DROPOUT, sequence=4096),
            "h100",
            gpus,
            12,
            (1,) * 96,
            batch,
            s,
        )
        for gpus, batch, s in ((1536, 768, 10.3), (6144, 2304, 8.0))
    ),
    # DualPipe on 16 ranks, which hold two copies of the model: folded onto 8 ranks with twice the
    # data parallelism. 180,000 GPU hours for 1e12 tokens; multi-token prediction is on the last
    # stage.
    Training(
        "DeepSeek-V3",
        _DEEPSEEK,
        _IN_PAIRS,
        "h800",
        2048,
        8,
        (*[4] * 15, 1),
        15360,
        15360 * 4096 * 180e3 * 3600 / 1e12 / 2048,
        "dualpipe-v",
    ),
)


def work_of(training: Training) -> Work:
    """Return the estimated work of ``training``."""
    execution = replace(training.execution, pipeline_span=training.gpus)
    copies, experts = training.copies, execution.expert_parallel
    state = TrainingState(
        distributed=True,
        data_parallel=copies,
        expert_data_parallel=copies // experts,
        bucket=default_bucket(copies),  # all of them overlap reductions, or have one copy
    )
    work = estimated_work(
        training.model,
        execution,
        state,
        _GPUS[training.gpu].rates(execution.precision),
        ranks=training.pipeline,
        microbatches=training.batch // copies,
    )
    return replace(work, pairs=execution.overlap > 0)


def predicted_seconds(training: Training) -> float:
    """Return the estimated seconds of a step of ``training``."""
    layout = Layout(training.layers)
    return evaluate(work_of(training), schedule_of(training), layout, search=False).seconds


def schedule_of(training: Training) -> str:
    """Return the spec of the schedule of ``training``."""
    chunks = len(training.layers) // training.pipeline
    return training.schedule or (f"interleaved:vpp={chunks}" if chunks > 1 else "1f1b")


def pair_seconds(training: Training) -> float:
    """Return the estimated seconds of F and B of the second stage as a pair."""
    costs = work_of(training).variant(training.schedule, Layout(training.layers)).problem.costs
    passes = sum(figures[1] for figures in costs.seconds.values())
    return passes - costs.overlap.hidden[Kind.FULL_BACKWARD][1][1]


def main() -> None:
    ratios = []
    for training in TRAININGS:
        seconds = predicted_seconds(training)
        ratios.append(seconds / training.seconds)
        print(
            f"{ratios[-1]:5.2f} {seconds:6.2f} {training.seconds:6.2f} s  {training.name} on "
            f"{training.gpus} {training.gpu.upper()}"
        )
    print(f"median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")
    pair = pair_seconds(TRAININGS[-1])
    print(f"a pair of 4 layers each of {TRAININGS[-1].name}: {pair:.3f} s, in its profile {PAIR} s")


if __name__ == "__main__":
    main()
