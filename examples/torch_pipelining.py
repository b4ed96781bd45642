"""A schedule from a table in torch's own runtime: no Megatron, and nothing of ours.

    megatron-ext simulate v-auto --pp 2 -m 8 --memory-limit 1.5 --torch-csv v-auto.csv
    torchrun --nproc-per-node 2 examples/torch_pipelining.py v-auto.csv
    torchrun --nproc-per-node 2 examples/torch_pipelining.py ZBVZeroBubble

The last line runs torch's own V, which has the same losses.
"""

import csv
import os
import re
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, get_schedule_class

LAYERS, WIDTH, VOCABULARY, SEQUENCE, BATCH, MICROBATCHES, STEPS = 8, 32, 16, 8, 16, 8, 10


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        torch.manual_seed(number)  # a stage has the same weights, on whatever rank it is
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build_part(stage, stages):
    """Its layers, with the embedding before the first and the head after the last."""
    layers = LAYERS // stages
    part = [Layer(number) for number in range(stage * layers, (stage + 1) * layers)]
    torch.manual_seed(LAYERS)
    embedding, output_layer = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    return nn.Sequential(
        *[embedding] * (stage == 0), *part, *[output_layer] * (stage == stages - 1)
    )


def stages_of_ranks(schedule, ranks):
    """The stages of each rank: those that its line of the table names, or the two of torch's V."""
    if not schedule.endswith(".csv"):
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    with open(schedule, newline="") as table:
        rows = [re.findall(r"\b\d+", " ".join(row)) for row in csv.reader(table)]
    return [sorted(set(map(int, row))) for row in rows]


def build_pipeline(schedule, stages):
    if schedule.endswith(".csv"):
        pipeline = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=mean_loss)
        pipeline._load_csv(schedule)
        return pipeline
    return get_schedule_class(schedule)(stages, MICROBATCHES, loss_fn=mean_loss)


def mean_loss(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main(schedule):
    has_gpus = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpus else "cpu")
    dist.init_process_group("nccl" if has_gpus else "gloo")
    rank = dist.get_rank()
    placed = stages_of_ranks(schedule, dist.get_world_size())
    count = sum(map(len, placed))
    parts = {stage: build_part(stage, count).to(device) for stage in placed[rank]}
    stages = [PipelineStage(part, stage, count, device) for stage, part in parts.items()]
    pipeline = build_pipeline(schedule, stages)
    weights = [weight for part in parts.values() for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(device)
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        inputs = [tokens] if 0 in parts else []
        target = (5 * tokens + 3) % VOCABULARY if count - 1 in parts else None
        pipeline.step(*inputs, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        if losses:  # only the rank of the last stage has losses
            print("step", step, "loss", sum(loss.item() for loss in losses) / MICROBATCHES)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
