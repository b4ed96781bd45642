"""Tests of models other than a bare GPTModel: a stage may be any module with set_input_tensor.

Attributes that only GPT models have are optional. Steps that a caller runs on two ranks without
Megatron's training loop have the losses and gradients of stock's schedules to the last bit.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules

import megatron_ext
from megatron_ext.compile.registry import ResolvedSpec, choose
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.runtime.measure.profile import STEPS
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line, v
from scripts.evaluation.recipes.recipe import expanded
from tests.helpers import callers
from tests.helpers.callers import (
    assert_same,
    draw_by_name,
    first_and_last,
    named_parameters,
    small_config,
)
from tests.helpers.combinations import at_night
from tests.helpers.covers.marks import kinds
from tests.helpers.documents import check_written, table
from tests.helpers.ranks import run_ranks, values
from tests.pipeline.callers.test_callers import WITHOUT_LAYERS
from tests.pipeline.training import test_adapters

RANKS = 2
SEQUENCE, BATCH, WIDTH, VOCABULARY, MICROBATCHES = 12, 2, 16, 32, 6


# --- a module written by a caller, without Megatron's transformer layers


class Block(torch.nn.Module):
    """Model of one stage: a linear layer of Megatron's and one of torch's."""

    def __init__(self, config: ModelParallelConfig, stage: int) -> None:
        super().__init__()
        self.config = config
        # Stock's interleaved schedule reads model_type.
        self.model_type = ModelType.encoder_or_decoder
        self.stage = stage
        self.inner = ColumnParallelLinear(
            WIDTH, WIDTH, config=config, init_method=torch.nn.init.normal_, bias=False
        )
        self.outer = torch.nn.Linear(WIDTH, WIDTH)
        self._input: torch.Tensor | None = None
        draw_by_name(names_of_block(self))

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        (self._input,) = tensors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.inner(x if self._input is None else self._input)
        return self.outer(torch.relu(hidden))


def names_of_block(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((f"{chunk.stage}.{name}", weight) for name, weight in chunk.named_parameters())


def blocks(stages: tuple[int, ...]) -> list[torch.nn.Module]:
    config = ModelParallelConfig(
        pipeline_model_parallel_size=RANKS,
        virtual_pipeline_model_parallel_size=len(stages) if len(stages) > 1 else None,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        # With batched messages, stock's interleaved schedule mixes up directions on two ranks.
        overlap_p2p_comm=len(stages) > 1,
        batch_p2p_comm=len(stages) == 1,
    )
    config.hidden_size = WIDTH  # Megatron's schedules read hidden_size from the config.
    return [Block(config, stage) for stage in stages]


def vectors(microbatches: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator) for _ in range(microbatches)]


def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    loss = output.square().mean()
    return loss, {"loss": loss.item()}


def block_step(
    schedule: str, microbatches: int = MICROBATCHES, **call: Any
) -> tuple[list[Any], callers.Gradients]:
    """Run a step of `Block`s on the stages of this rank under ``schedule``, and return losses and
    gradients."""
    placement = choose(schedule).place(RANKS)
    stages = placement.stages_of[torch.distributed.get_rank()]
    return callers.whole_step(
        lambda: blocks(stages),
        names_of_block,
        lambda data, model: (model(next(data)), mean),
        partial(vectors, microbatches),
        chunks=placement.chunks if placement.chunks > 1 else None,
        **{"seq_length": SEQUENCE, "micro_batch_size": BATCH} | call,
    )


OWN = ("1f1b", "zb-h1", "interleaved", "interleaved-zb", "zb-v")


def test_a_module_of_the_callers_own() -> None:
    """A model made of a caller's own modules trains. Such a training used to end with
    `_get_attr_wrapped_model couldn't find attribute decoder`."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = {1: block_step("1f1b"), 2: block_step("interleaved")}
            evaluated = block_step("interleaved", forward_only=True)
            for schedule in OWN:
                with megatron_ext.install(schedule=schedule):
                    stocks = expected[choose(schedule).example.chunks]
                    assert_same(block_step(schedule), stocks)
            with megatron_ext.install(schedule="interleaved-zb"):
                assert_same(block_step("interleaved-zb", forward_only=True), evaluated)
                # A step of 7 microbatches, which stock's interleaved schedule refuses on two ranks.
                block_step("interleaved-zb", microbatches=7)

    values(run_ranks(RANKS, on_rank))


def test_with_several_chunks_either_sequence_length_may_be_meant() -> None:
    """With several chunks a rank, messages may have the length seq_length or decoder_seq_length.
    Stock's interleaved schedule uses seq_length, its other schedules use decoder_seq_length. Our
    schedules used to expect decoder_seq_length only, and refused outputs of the other length."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            expected = block_step("interleaved")
            with megatron_ext.install(schedule="interleaved-zb"):
                for lengths in ((SEQUENCE, 4), (4, SEQUENCE)):
                    ours = block_step(
                        "interleaved-zb",
                        seq_length=lengths[0],
                        decoder_seq_length=lengths[1],
                    )
                    assert_same(ours, expected)
            with (
                megatron_ext.install(schedule="interleaved-zb", p2p="batched"),
                pytest.raises(ValueError, match="batched does not go with seq_length=4, decoder"),
            ):
                block_step("interleaved-zb", seq_length=4, decoder_seq_length=SEQUENCE)

    values(run_ranks(RANKS, on_rank))


def test_a_rank_has_as_many_chunks_and_iterators_as_stages() -> None:
    """A step is refused if a rank passes fewer model chunks or data iterators than it has stages. A
    wrong number used to end with an IndexError on rank 0, and the other ranks waited for rank 0."""

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()), megatron_ext.install(schedule="interleaved-zb"):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
            step = megatron_ext_step()
            chunks = blocks((rank, rank + RANKS))
            with pytest.raises(ValueError, match="called with 1 model chunk: build as many"):
                step(model=chunks[:1], data_iterator=[iter(())])
            with pytest.raises(ValueError, match="2 model chunks and 1 data iterator: give each"):
                step(model=chunks, data_iterator=[iter(())])

    values(run_ranks(RANKS, on_rank))


def megatron_ext_step() -> Callable[..., Any]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    return partial(
        get_forward_backward_func(),
        forward_step_func=None,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )


def test_costs_that_cannot_be_estimated_are_equal_and_can_be_measured(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"

    def on_rank(rank: int) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("megatron_ext").addHandler(handler)
        with apply(cpu.patches()):
            with megatron_ext.install(schedule="zb-h1"):
                block_step("zb-h1")
            with megatron_ext.install(schedule="zb-h1", costs=f"profile:{path}"):
                parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
                (chunk,) = blocks((rank,))
                for _ in range(5):
                    megatron_ext_step()(
                        forward_step_func=lambda data, model: (model(next(data)), mean),
                        model=[chunk],
                        data_iterator=[iter(vectors(MICROBATCHES))],
                    )
        return lines

    lines, _ = values(run_ranks(RANKS, on_rank))
    told = "the costs of Block cannot be estimated, and are taken as equal for every stage"
    assert [told in text for text in lines] == [True] + [False] * (len(lines) - 1)
    assert "costs taken as equal (of a microbatch on one rank): f=1,i=1,w=1" in lines[1]
    assert "measured costs" in lines[-1]
    costs = parse_costs(str(path), line(RANKS))
    assert costs.held_bytes is not None and all(map(all, costs.seconds.values()))


# --- a language model with an image encoder on the first stage

IMAGES = 4  # number of embeddings of an image, which come before the text
TEXT = SEQUENCE - IMAGES


def transformer_config(chunks: int | None) -> TransformerConfig:
    return small_config(4, RANKS, hidden_size=WIDTH, virtual_pipeline_model_parallel_size=chunks)


class Tower(MegatronModule):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        init = {"config": config, "init_method": config.init_method, "bias": True}
        self.patches = ColumnParallelLinear(3, 2 * WIDTH, **init)
        self.norm = torch.nn.LayerNorm(2 * WIDTH)
        self.projection = RowParallelLinear(
            2 * WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=False, **init
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.patches(images)
        return self.projection(torch.relu(self.norm(hidden)))[0]


class Multimodal(MegatronModule):
    """Multimodal model as in Megatron-Bridge: each stage is a part of the language model, the first
    with an image encoder before it."""

    def __init__(self, config: TransformerConfig, vp_stage: int) -> None:
        super().__init__(config)
        ends = first_and_last(vp_stage)
        self.pre_process, self.post_process = ends["pre_process"], ends["post_process"]
        self.share_embeddings_and_output_weights = False
        self.language_model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=False,
            vp_stage=vp_stage,
            **ends,
        )
        self.tower = Tower(config) if self.pre_process else None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        self.language_model.set_input_tensor(tensors[0])

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embeddings = None
        if self.tower is not None:
            text = self.language_model.embedding(tokens, torch.arange(TEXT).expand(BATCH, -1))
            embeddings = torch.cat([self.tower(images), text])
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        labels = torch.cat([tokens, tokens], dim=1)[:, :SEQUENCE]
        return self.language_model(None, None, mask, decoder_input=embeddings, labels=labels)


def multimodal(vp_stage: int, chunks: int | None) -> torch.nn.Module:
    return Multimodal(transformer_config(chunks), vp_stage)


def multimodal_step(data: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    return model(*next(data)), mean


def images_and_tokens() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(IMAGES, BATCH, 3, generator=generator),
            torch.randint(VOCABULARY, (BATCH, TEXT), generator=generator),
        )
        for _ in range(MICROBATCHES)
    ]


# Megatron's LLaVA is built here as examples/multimodal builds it: the configs of the image encoder
# and of the projection are copies of the language model's config.

TOKEN_OF_IMAGE = -200


def llava(vp_stage: int, chunks: int | None, layout: str | None = None) -> torch.nn.Module:
    language = transformer_config(chunks) if layout is None else laid_out_config(layout)
    tower, projection = copy.deepcopy(language), copy.deepcopy(language)
    if layout is not None:  # without this Megatron would apply the layout to the encoder, too
        tower.pipeline_model_parallel_layout = projection.pipeline_model_parallel_layout = None
    tower.num_layers = 2
    tower.vision_model_type = "internvit"  # other vision models need Transformer Engine's norms
    tower.pipeline_model_parallel_size = projection.pipeline_model_parallel_size = 1
    ends = first_and_last(vp_stage)
    return LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=VOCABULARY,
        language_max_sequence_length=SEQUENCE,
        vision_transformer_config=tower,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=projection,
        vision_projection_layer_spec=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
        ),
        add_encoder=ends["pre_process"],
        img_h=8,
        img_w=8,
        patch_dim=4,
        vp_stage=vp_stage,
        **ends,
    )


def laid_out_config(layout: str) -> TransformerConfig:
    return small_config(
        expanded(layout).count("t"),
        dist.get_world_size(),
        hidden_size=WIDTH,
        pipeline_model_parallel_layout=layout,
    )


def llava_step(data: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    images, tokens = next(data)
    loss_mask = torch.ones_like(tokens, dtype=torch.float)
    output, _ = model(
        images,
        tokens,
        torch.arange(tokens.shape[1]).expand(BATCH, -1),
        None,
        labels=tokens.clamp(min=0),
        loss_mask=loss_mask,
    )
    return output, mean


def images_in_tokens() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of an image and tokens. An image has 2 x 2 patches and a class token; their five
    embeddings replace one token of each sequence."""
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(BATCH, 3, 8, 8, generator=generator),
            torch.cat(
                [
                    torch.full((BATCH, 1), TOKEN_OF_IMAGE),
                    torch.randint(VOCABULARY, (BATCH, TEXT - 1), generator=generator),
                ],
                dim=1,
            ),
        )
        for _ in range(MICROBATCHES)
    ]


MODELS = {
    "a wrapper": (multimodal, multimodal_step, images_and_tokens),
    "LLaVAModel": (llava, llava_step, images_in_tokens),
}


def model_step(
    name: str,
    chunks: int | None,
    is_frozen: Callable[[str], bool],
    layout: str | None = None,
    **call: Any,
) -> tuple[list[Any], callers.Gradients]:
    """Run a step of the model ``name`` on ``chunks`` chunks a rank, with gradients of the parts
    that are not frozen."""
    make, forward_step, data = MODELS[name]

    def build() -> list[torch.nn.Module]:
        settings = {} if layout is None else {"layout": layout}
        made = [make(number, chunks, **settings) for number in range(chunks or 1)]
        for chunk in made:
            draw_by_name(names_of_model(chunk))
            for parameter, weight in chunk.named_parameters():
                weight.requires_grad = not is_frozen(parameter)
        return made

    sizes = {"seq_length": SEQUENCE, "micro_batch_size": BATCH}
    return callers.whole_step(
        build, names_of_model, forward_step, data, chunks=chunks, **sizes | call
    )


def names_of_model(chunk: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return named_parameters(chunk, chunk.language_model)


TRAINED: dict[str, Callable[[str], bool]] = {
    "all": lambda name: False,
    "all but the tower": lambda name: name.startswith(("tower", "vision_model")),
    "the tower": lambda name: name.startswith("language_model"),
    "the projection": lambda name: not name.startswith(("tower.projection", "vision_projection")),
}
FROZEN: dict[str, dict[str, bool]] = {
    "all": {},
    "all but the tower": {"freeze_vision_model": True},
    "the tower": {"freeze_language_model": True},
    "the projection": {"freeze_vision_model": True, "freeze_language_model": True},
}

Case = tuple[str, str, tuple[str, ...]]  # model, its trained parts, schedules

BY_DAY: tuple[Case, ...] = (
    ("a wrapper", "all", ("1f1b", "zb-h1", "interleaved-zb", "zb-v")),
    ("a wrapper", "all but the tower", ("zb-v",)),
    ("LLaVAModel", "all", ("zb-h1", "interleaved-zb", "zb-v")),
)
BY_NIGHT: tuple[Case, ...] = (
    ("a wrapper", "all", ("interleaved", "v-half", "hanayo:waves=1")),
    ("a wrapper", "all but the tower", ("1f1b", "zb-h1", "interleaved-zb")),
    ("LLaVAModel", "all", ("1f1b", "interleaved", "v-half", "hanayo:waves=1")),
    ("LLaVAModel", "all but the tower", ("zb-h1", "interleaved-zb", "zb-v")),
    ("a wrapper", "the tower", ("zb-h1", "interleaved-zb", "zb-v")),
    ("a wrapper", "the projection", ("zb-h1", "interleaved-zb", "zb-v")),
    ("LLaVAModel", "the tower", ("zb-h1", "interleaved-zb", "zb-v")),
    ("LLaVAModel", "the projection", ("zb-h1", "interleaved-zb", "zb-v")),
)


def case(name: str, trained: str, schedules: tuple[str, ...]) -> Any:
    mark = pytest.mark.covers("A", kinds(schedules), vision=True, **FROZEN[trained])
    return pytest.param(name, trained, schedules, marks=mark)


@pytest.mark.parametrize(
    ("name", "trained", "schedules"), [case(*names) for names in (*BY_DAY, *at_night(*BY_NIGHT))]
)
def test_a_tower_on_the_first_stage(name: str, trained: str, schedules: tuple[str, ...]) -> None:
    """A model with an image encoder on the first stage trains. The training used to end with
    `_get_attr_wrapped_model couldn't find attribute decoder`. Under a V schedule LLaVA's encoder
    used to be built with as many layers as the layout gives the language model on that stage,
    without an error."""
    is_frozen = TRAINED[trained]

    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            # Callers of stock's 1F1B give two lengths: of the image's embeddings, and of the whole
            # sequence.
            lengths: dict[str, Any] = {"seq_length": 5, "decoder_seq_length": SEQUENCE}
            expected = model_step(name, None, is_frozen, **lengths)
            for schedule in schedules:
                chunks = choose(schedule).example.chunks
                queue.weights = set()
                with megatron_ext.install(schedule=schedule):
                    ours = model_step(name, chunks if chunks > 1 else None, is_frozen)
                put_off, queue.weights = queue.weights, None
                assert_same(ours, expected)
                if name == "a wrapper":
                    check_put_off(choose(schedule), put_off, rank, is_frozen("tower.norm"))

    values(run_ranks(RANKS, on_rank))


# Layouts as the command `plan` writes them, with fewer layers behind the image encoder. Stock's
# layout comes first.
LAID_OUT: dict[int, dict[str, str]] = {
    2: {
        "1f1b": "Ett|t*5L",
        "zb-h1": "Ett|t*5L",
        "interleaved-zb": "Et|tt|tt|ttL",
        "zb-v": "Et|tt|tt|ttL",
    },
    4: {
        "1f1b": "Et|ttt|ttt|ttL",
        "zb-h1": "Et|ttt|ttt|ttL",
        "interleaved-zb": "Et|t|t|t|tt|t|t|tL",
        "zb-v": "Et|t|t|tt|t|t|t|tL",
    },
}


@pytest.mark.parametrize("ranks", [2, *at_night(4)])
def test_a_layout_balanced_to_the_tower(ranks: int) -> None:
    def on_rank(rank: int) -> None:
        with apply(cpu.patches()):
            lengths: dict[str, Any] = {"seq_length": 5, "decoder_seq_length": SEQUENCE}
            (_, stocks), *ours = LAID_OUT[ranks].items()
            expected = model_step("LLaVAModel", None, TRAINED["all"], stocks, **lengths)
            for schedule, layout in ours:
                chunks = choose(schedule).example.chunks
                own = chunks if chunks > 1 else None
                with megatron_ext.install(schedule=schedule):
                    assert_same(model_step("LLaVAModel", own, TRAINED["all"], layout), expected)

    values(run_ranks(ranks, on_rank))


def test_the_tower_is_measured(tmp_path: Path) -> None:
    """A training that measures costs also measures an image encoder. It used to write no costs file
    for models with parts outside the language model."""
    path = tmp_path / "costs.json"

    def on_rank(rank: int) -> None:
        with (
            apply(cpu.patches()),
            megatron_ext.install(schedule="zb-v", costs=f"profile:{path}"),
        ):
            parallel_state.initialize_model_parallel(
                pipeline_model_parallel_size=RANKS, virtual_pipeline_model_parallel_size=2
            )
            model_parallel_cuda_manual_seed(0)
            model = [llava(number, 2) for number in range(2)]
            for _ in range(STEPS):
                megatron_ext_step()(
                    forward_step_func=llava_step,
                    model=model,
                    data_iterator=[iter(images_in_tokens()) for _ in model],
                )

    values(run_ranks(RANKS, on_rank))
    costs = parse_costs(str(path), v(RANKS))
    written = json.loads(path.read_text())
    tower = written["layers"]["tower"]
    assert costs.tower is not None and all(costs.tower.seconds)
    assert costs.tower.seconds == pytest.approx(tower["seconds"])
    assert len(tower["forward by microbatch"]) == MICROBATCHES
    # The costs "f" leave out the encoder, which only the first stage has. Measured forward passes
    # contain the encoder, whose share of a pass is never negative.
    measured = tower["forward by microbatch"]
    assert min(measured) >= 0 and max(measured) > 0
    first = written["f"][0] + tower["seconds"][0]
    assert costs.seconds[Kind.FORWARD][:3] == pytest.approx([first, *written["f"][1:3]])


def check_put_off(
    resolved: ResolvedSpec, put_off: set[torch.Tensor], rank: int, is_frozen: bool
) -> None:
    """Assert that the encoder's linear layers are split like those of other layers: a frozen layer
    has no W, and a layer whose input needs no gradient has none either."""
    shapes = {tuple(weight.shape) for weight in put_off}
    is_here = resolved.place(RANKS).rank_of[0] == rank
    assert ((WIDTH, 2 * WIDTH) in shapes) == (
        resolved.traits.splits_backward and is_here and not is_frozen
    )
    assert (2 * WIDTH, 3) not in shapes


def test_the_table_of_models() -> None:
    models: dict[str, Sequence[tuple[str, Sequence[str]]]] = {
        "a module of the caller's own": [("all", OWN)],
        "a wrapper: GPTModel behind a tower": _cases("a wrapper"),
        "Megatron's LLaVAModel": _cases("LLaVAModel"),
        "GPTModel, stages without layers": [("all", tuple(WITHOUT_LAYERS))],
        "GPTModel with low-rank adapters": test_adapters.compared(),
    }
    trained_parts: dict[tuple[str, ...], list[str]] = {}  # by model and schedules
    for kind, cases in models.items():
        for trained, schedules in cases:
            cells = (_under(schedules, placement) for placement in ("line", "loop", "v wave"))
            trained_parts.setdefault((kind, *cells), []).append(trained)
    rows = [[kind, "; ".join(parts), *cells] for (kind, *cells), parts in trained_parts.items()]
    check_written("models", table(["model", "trained", "lines", "loops", "V's, waves"], rows))


def _cases(name: str) -> list[tuple[str, list[str]]]:
    """Return the trained parts of the model ``name``, each with all schedules under which tests
    train it."""
    schedules: dict[str, list[str]] = {trained: [] for trained in TRAINED}
    for model, trained, own in (*BY_DAY, *BY_NIGHT):
        if model == name:
            schedules[trained] += own
    return list(schedules.items())


def _under(schedules: Sequence[str], placements: str) -> str:
    named = [name for name in schedules if choose(name).example.name in placements.split()]
    return ", ".join(named) or "-"
