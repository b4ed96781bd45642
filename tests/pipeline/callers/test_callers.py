"""Tests of code that calls Megatron's pipeline schedule itself, as Megatron-Bridge, verl and NeMo
do.

Such callers bring their own model, p2p_communicator, pg_collection and loss.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import megatron_ext
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.tied import tied_weights
from megatron_ext.compile.registry import choose
from megatron_ext.features.race.adapter import step_race, turn
from megatron_ext.features.race.adapter.hooks import RaceHooks
from megatron_ext.observe.trace import NAME, read_trace
from megatron_ext.patches import cpu
from megatron_ext.patches.engine import apply
from megatron_ext.race import race_texts, rounds
from megatron_ext.runtime.host.host_memory import HostMemory
from megatron_ext.runtime.store import leader
from tests.helpers.callers import (
    assert_same,
    draw_by_name,
    first_and_last,
    forward_step,
    named_parameters,
    small_config,
    whole_step,
)
from tests.helpers.combinations import at_night, in_pairs, nightly
from tests.helpers.covers.marks import kinds
from tests.helpers.ranks import run_ranks, running_ranks, values

RANKS = 4
SEQUENCE, BATCH, VOCABULARY, MICROBATCHES = 8, 2, 32, 6


def build_model() -> GPTModel:
    config = small_config(RANKS, parallel_state.get_pipeline_model_parallel_world_size())
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )


def step(
    own_groups: bool,
    forward_only: bool = False,
    sequences_vary: bool = False,
    microbatches: int = MICROBATCHES,
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Run one step, and return the losses and gradients of this rank."""
    torch.manual_seed(1)
    model = build_model()
    model.config.variable_seq_lengths = sequences_vary
    generator = torch.Generator().manual_seed(2)
    data = iter(
        torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        for _ in range(microbatches)
    )
    groups: dict[str, Any] = {}
    if own_groups:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        groups["p2p_communicator"] = P2PCommunicator(pipeline, model.config)
        groups["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    run = schedules.get_forward_backward_func()
    losses = run(
        forward_step_func=forward_step,
        data_iterator=data,
        model=[model],
        num_microbatches=microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        **groups,
    )
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def installed(pipeline_size: int, **settings: Any) -> Iterator[None]:
    """Create pipelines of ``pipeline_size`` ranks, and install a schedule within the context."""
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pipeline_size)
        model_parallel_cuda_manual_seed(0)
        with megatron_ext.install(**settings):
            yield


def process_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def on_rank(rank: int, schedule: str, p2p: str, own_groups: bool, **more: Any) -> None:
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
        model_parallel_cuda_manual_seed(0)
        expected_losses, expected = step(own_groups)
        expected_evaluation, _ = step(own_groups, forward_only=True)
        before = process_groups()
        with megatron_ext.install(schedule=schedule, p2p=p2p, **more):
            losses, gradients = step(own_groups)
            evaluation, none = step(own_groups, forward_only=True)
        neighbours = 1 if rank in (0, RANKS - 1) else 2
        assert process_groups() - before == (2 * neighbours if p2p == "async" else 0)
        assert losses == expected_losses and len(losses) == (MICROBATCHES if rank == 3 else 0)
        assert evaluation == expected_evaluation and not none
        assert gradients.keys() == expected.keys() and gradients
        for name, gradient in gradients.items():
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(
    ("schedule", "p2p", "own_groups"),
    in_pairs(["1f1b", "zb-h1"], ["async", "batched"], [False, True]),
)
def test_gradients_and_losses_are_stocks(schedule: str, p2p: str, own_groups: bool) -> None:
    """A caller with process groups of its own gets stock's gradients and losses. Batched messages
    use the caller's groups, and no group is created."""
    values(run_ranks(RANKS, lambda rank: on_rank(rank, schedule, p2p, own_groups)))


@nightly("test_parity.py has the launcher with it")
def test_recomputed_passes() -> None:
    values(
        run_ranks(RANKS, lambda rank: on_rank(rank, "zb-h1", "async", True, recompute="first:4"))
    )


def traced_loop(rank: int, folder: Path, own_groups: bool, schedule: str | None = "zb-h1") -> None:
    """Run three training steps with evaluations in between; the trace is to show the second and the
    third."""
    with apply(cpu.patches()):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
        model_parallel_cuda_manual_seed(0)
        with megatron_ext.install(schedule=schedule, trace=str(folder), trace_iters="2:4"):
            for forward_only in (False, True, False, True, False):
                step(own_groups, forward_only)


@pytest.mark.parametrize(
    ("own_groups", "schedule", "kinds"),
    [(True, "zb-h1", 3), (True, None, 2), *at_night((False, "zb-h1", 3))],
)
def test_steps_of_a_loop_of_ones_own_are_counted_for_a_trace(
    own_groups: bool, schedule: str | None, kinds: int, tmp_path: Path
) -> None:
    """In a caller's own loop, a trace counts training steps from 1 and does not count evaluations.
    Steps under stock's schedule are counted in the same way."""
    values(run_ranks(RANKS, lambda rank: traced_loop(rank, tmp_path, own_groups, schedule)))
    steps = read_trace(tmp_path)
    assert [traced.iteration for traced in steps] == [2, 3]
    for traced in steps:
        assert [len(row) for row in traced.measured.compute] == [kinds * MICROBATCHES] * RANKS


def test_a_trace_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    """A training continues if its trace cannot be written, and prints one line about it. It used to
    print a line for each step."""
    (tmp_path / NAME).mkdir()
    results = run_ranks(RANKS, lambda rank: traced_loop(rank, tmp_path, False))
    values(results)
    (line,) = [line for line in results[-1].stderr.splitlines() if "missing in the trace" in line]
    assert "iteration 2 is missing in the trace" in line and "Is a directory" in line
    assert "further ones that are missing are not named" in line


def test_varying_sequence_lengths_cannot_be_batched() -> None:
    def refused(rank: int) -> str:
        with apply(cpu.patches()):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=RANKS)
            model_parallel_cuda_manual_seed(0)
            with (
                megatron_ext.install(schedule="1f1b", p2p="batched"),
                pytest.raises(ValueError, match="batched does not go with variable_seq_lengths"),
            ):
                step(own_groups=False, sequences_vary=True)
            # the barrier keeps ranks alive, because one that ends would break the connections of
            # others
            dist.barrier()
            return "refused"

    assert values(run_ranks(RANKS, refused)) == ["refused"] * RANKS


@pytest.mark.parametrize(
    ("size", "stale", "listed"),
    [
        (RANKS, [2], "global ranks 0-1, 3; .* on global rank 2;"),
        # In this case all ranks of the second pipeline have the other program.
        (2, [1, 3], "global ranks 0, 2; .* on global ranks 1, 3;"),
    ],
)
def test_a_rank_with_another_program_is_found_before_the_first_pass(
    size: int, stale: list[int], listed: str
) -> None:
    """Ranks with another program than the others are found before the first pass, and listed. Each
    rank reads its own copy of a schedule file, and some copies are stale. Two programs that are
    valid by themselves could wait for each other for ever."""

    def differing(rank: int) -> str:
        schedule = "gpipe" if rank in stale else "1f1b"
        with installed(size, schedule=schedule):
            with pytest.raises(RuntimeError, match=f"built different programs .*{listed}"):
                step(own_groups=False)
            return "found"

    assert values(run_ranks(RANKS, differing)) == ["found"] * RANKS


@pytest.mark.parametrize("size", [RANKS, 2])
def test_all_pipelines_take_the_costs_of_global_rank_0(size: int) -> None:
    """All pipelines use the costs of global rank 0. Costs files may differ between nodes; each
    pipeline used to take the file of its own first rank."""

    def told(rank: int) -> float:
        costs = f"f={1 + rank},i=1,w={1 + rank},comm={rank}"
        with installed(size, schedule="zb-h1", costs=costs):
            step(own_groups=False)
            (agreed,) = schedules.get_forward_backward_func()._training._programs.costs.values()
            return agreed.links.p2p_seconds

    assert values(run_ranks(RANKS, told)) == [0.0] * RANKS


def test_pipelines_that_nothing_ties_may_come_to_other_numbers_of_microbatches() -> None:
    """Pipelines that do not communicate with one another may run different numbers of microbatches.
    verl's do, because verl batches by tokens. All ranks used to compare programs in each step: a
    pipeline with a new number of microbatches waited, without a message, for a pipeline that
    already had its program and compared nothing."""

    def differing(rank: int) -> str:
        with installed(2, schedule="1f1b"):
            step(own_groups=False)
            step(own_groups=False, microbatches=4 if rank in (1, 3) else MICROBATCHES)
            return "done"

    assert values(run_ranks(RANKS, differing)) == ["done"] * RANKS


SECOND = (1, 3)  # global ranks of the second of two pipelines


def test_offload_takes_programs_that_only_one_pipeline_comes_to() -> None:
    """A pipeline with offload may build a program that no other pipeline builds. All ranks together
    used to count the host memory of each new program, so a pipeline with a new program waited for
    the other pipeline, which had no new program."""

    def differing(rank: int) -> list[str]:
        told: list[str] = []
        check = HostMemory.check

        def note(text: str) -> str:
            told.append(text)
            return text

        with (
            installed(2, schedule="zb-h1", activation_offload="full", costs="estimate"),
            mock.patch.object(HostMemory, "check", lambda *asked: note(check(*asked))),
        ):
            for microbatches in (MICROBATCHES, 4, 9):
                step(own_groups=False, microbatches=microbatches if rank in SECOND else 6)
            return told

    told = values(run_ranks(RANKS, differing))
    assert [len(of_rank) for of_rank in told] == [1, 3, 1, 3]
    assert len({of_rank[0] for of_rank in told}) == 1


def test_measured_costs_come_to_all_ranks_at_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured costs take effect on all ranks at the same step. The second of two pipelines
    measures enough steps of a program later than the first, and it alone meets a second shape.
    Pipelines used to wait for each other, because all ranks exchanged the costs of each shape, also
    of one that only one pipeline had."""
    monkeypatch.setattr(leader, "AHEAD_SECONDS", 0.1)

    def measuring(rank: int) -> tuple[list[int], list[object]]:
        measured_after = []
        with installed(2, schedule="zb-h1", costs=f"profile:{tmp_path / 'costs.json'}"):
            for number in range(1, 11):
                is_other = rank in SECOND and number in (2, 3)
                if rank in SECOND and number == 4:
                    monkeypatch.setitem(globals(), "BATCH", 3)
                    step(own_groups=False)
                    monkeypatch.setitem(globals(), "BATCH", 2)
                    continue
                step(own_groups=False, microbatches=4 if is_other else 6)
                programs = schedules.get_forward_backward_func()._training._programs
                if programs.are_measured((2, SEQUENCE)):
                    measured_after.append(number)
            return measured_after, [programs.costs[2, SEQUENCE], programs.costs.get((3, SEQUENCE))]

    told = values(run_ranks(RANKS, measuring))
    assert {tuple(after) for after, _ in told} == {(7, 8, 9, 10)}
    assert all(costs == told[0][1][0] for _, (costs, _) in told)
    alone = [told[rank][1][1] for rank in range(RANKS)]
    assert alone[0] is None and alone[1] == alone[3] != None  # noqa: E711


@pytest.mark.parametrize(
    "sizes", [{4: 4, 5: 6}, *at_night({4: 4}, {n: 4 + n % 2 for n in range(2, 18)})]
)
def test_a_race_is_the_same_on_all_ranks(
    sizes: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race of schedules makes the same choices on all ranks. The second pipeline has steps of
    another size, in some iterations or in all. It used to restart its race alone, and the first one
    waited at the end of its turn for ranks that did not come."""
    for module in (rounds, turn, step_race, race_texts):
        monkeypatch.setattr(module, "ROUNDS", 1, raising=False)
        monkeypatch.setattr(module, "TIMED", 1, raising=False)

    def racing(rank: int) -> list[tuple[Any, ...]]:
        seen = []
        size = MICROBATCHES
        with installed(2, race="zb-h1"):
            for number in range(1, 18):
                if rank in SECOND:
                    size = sizes.get(number, size)
                step(own_groups=False, microbatches=size)
                hooks = schedules.get_forward_backward_func()._training._hooks
                race = hooks[RaceHooks]._race
                standing = race._race and (race._race.current, race._race.rounds)
                seen.append((race._kept, standing))
        return seen

    told = values(run_ranks(RANKS, racing))
    assert all(seen == told[0] for seen in told)
    is_over = told[0][-1][0] is not None
    assert is_over == (len(sizes) < 3)


def test_another_program_is_found_in_a_later_step_too() -> None:
    """A rank that builds a different program in a later step is found, and all ranks end. Each rank
    compares its program with the one that was written to the store first. The rank that wrote it
    sees no difference, and ends too."""

    def differing(rank: int) -> None:
        with installed(RANKS, schedule="1f1b"):
            step(own_groups=False)
            if rank == 2:
                schedules.get_forward_backward_func()._training._programs.resolved_spec = choose(
                    "gpipe"
                )
            step(own_groups=False, microbatches=4)

    results = run_ranks(RANKS, differing, timeout=60)
    assert all(result.exit_code for result in results)
    assert "built different programs from" in "".join(
        result.error + result.stderr for result in results
    )


@pytest.mark.real_time
def test_an_error_between_the_passes_ends_the_other_ranks() -> None:
    """If one rank raises an error between its passes (Megatron's at the end of a step, or for lack
    of host memory), the other ranks end too. Only errors within passes used to be reported to the
    other ranks: if the caller of the failed rank went on, the other ranks waited for ever."""

    def failing(rank: int) -> None:
        with installed(RANKS, schedule="1f1b"):
            step(own_groups=False)
            if rank == 1:
                with (
                    mock.patch.object(Connections, "transport", broken),
                    pytest.raises(OSError, match="no memory"),
                ):
                    step(own_groups=False)
                time.sleep(600)
            step(own_groups=False)

    with running_ranks(RANKS, failing) as running:
        running.wait_until_ended(0, 2, 3)
        results = running.wait(timeout=0)
    assert [result.exit_code is None for result in results] == [False, True, False, False]


def broken(*args: object) -> None:
    raise OSError("no memory")


# --- layouts that a caller gives as a list

V_RANKS = 2
V_LAYOUT = [
    ["embedding", "decoder"],
    ["decoder", "decoder"],
    ["decoder"],
    ["decoder", "decoder", "loss"],
]
PREDICTING_LAYOUT = [*V_LAYOUT[:-1], ["decoder", "decoder", "mtp", "loss"]]
LINE_LAYOUT = [V_LAYOUT[0] + V_LAYOUT[1], V_LAYOUT[2] + V_LAYOUT[3]]


def build_chunks(
    layout: list[list[str]],
    groups: ProcessGroupCollection | None = None,
    tied: bool = False,
    depths: int | None = None,
) -> list[GPTModel]:
    """Return this rank's chunks of a model whose weights are drawn by name. ``depths`` is the
    number of depths of multi-token prediction."""
    config = small_config(6, V_RANKS, pipeline_model_parallel_layout=layout, mtp_num_layers=depths)
    spec = get_gpt_layer_local_spec()
    chunks = []
    for number in range(config.virtual_pipeline_model_parallel_size or 1):
        prediction = None
        if depths:
            prediction = get_gpt_mtp_block_spec(config, spec, False, vp_stage=number)
        chunk = GPTModel(
            config,
            spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=tied,
            pg_collection=groups,
            vp_stage=number,
            mtp_block_spec=prediction,
            **first_and_last(number),
        )
        chunks.append(chunk)
        draw_by_name(named_parameters(chunk))
    return chunks


def tokens() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        for _ in range(MICROBATCHES)
    ]


def run_step(chunks: list[GPTModel]) -> list[Any]:
    """Run one step in which every chunk reads the same data, and return this rank's losses."""
    return schedules.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(tokens()) for _ in chunks],
        model=chunks,
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )


def step_of_layout(layout: list[list[str]]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Run one step of the model cut by ``layout``, and return the losses and gradients of all
    ranks."""
    return whole_step(
        partial(build_chunks, layout),
        named_parameters,
        forward_step,
        tokens,
        chunks=len(layout) // V_RANKS if len(layout) > V_RANKS else None,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )


def test_a_v_by_a_layout_as_a_list() -> None:
    def on_v_and_line(rank: int) -> None:
        with apply(cpu.patches()):
            expected = step_of_layout(LINE_LAYOUT)
            with megatron_ext.install(schedule="zb-v"):
                ours = step_of_layout(V_LAYOUT)
        assert_same(ours, expected)
        assert len(ours[0]) == MICROBATCHES and len(ours[1]) > 6

    values(run_ranks(V_RANKS, on_v_and_line))


LAYERS = [["embedding"], ["decoder"] * 2, [], ["decoder"], [], ["decoder"] * 3, [], ["loss"]]
WITHOUT_LAYERS = {
    "interleaved:vpp=4": LAYERS,
    "interleaved-zb:vpp=4": LAYERS,
    "zb-v": [["embedding"], [], ["decoder"] * 6, ["loss"]],
    "v-half": [["embedding", "decoder"], ["decoder"] * 4, [], ["decoder", "loss"]],
    "hanayo:waves=2": LAYERS,
}


@pytest.mark.parametrize(
    "schedules",
    [
        pytest.param(
            schedules,
            marks=pytest.mark.covers(
                "A", kinds(schedules), pipeline_model_parallel_layout="E|tt||t||ttt||L"
            ),
        )
        for schedules in (("interleaved-zb:vpp=4", "zb-v"), *at_night(tuple(WITHOUT_LAYERS)))
    ],
)
def test_stages_without_layers(schedules: tuple[str, ...]) -> None:
    """Models train whose stages have the embedding only, the loss only, or no layer at all, as in
    recipes of GLM (Megatron-LM #1852). A stage without any layer passes its input on."""

    def on_all_placements(rank: int) -> None:
        with apply(cpu.patches()):
            line = [[*chain(*LAYERS[:4])], [*chain(*LAYERS[4:])]]
            expected = step_of_layout(line)
            for schedule in schedules:
                with megatron_ext.install(schedule=schedule):
                    assert_same(step_of_layout(WITHOUT_LAYERS[schedule]), expected)

    values(run_ranks(V_RANKS, on_all_placements))


# The last stage of these models has a copy of the embedding.
COPIES = pytest.mark.parametrize(
    ("layout", "tied", "depths"), [(V_LAYOUT, True, None), (PREDICTING_LAYOUT, False, 1)]
)


@COPIES
@pytest.mark.parametrize("own_groups", [False, True])
def test_an_embedding_group_that_does_not_fit_a_v_is_refused(
    own_groups: bool, layout: list[list[str]], tied: bool, depths: int | None
) -> None:
    """A V schedule is refused if the embedding group has the ranks of the first and last stage of a
    linear placement. The caller brought that group, or it was created before the schedule was
    installed.

    The last rank holds both the first and the last stage of a V. It would wait in that group for
    the other rank, so it raises the error. The other rank raises none.
    """

    def refused(rank: int) -> None:
        with apply(cpu.patches()), contextlib.ExitStack() as stack:
            groups = None
            if own_groups:
                stack.enter_context(megatron_ext.install(schedule="zb-v"))
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=V_RANKS)
            model_parallel_cuda_manual_seed(0)
            if own_groups:
                groups = ProcessGroupCollection.use_mpu_process_groups()
                groups.embd = dist.new_group(range(V_RANKS))
            else:
                stack.enter_context(megatron_ext.install(schedule="zb-v"))
            if rank == V_RANKS - 1:
                text = r"embedding group has ranks \[0, 1\].* lies on \[1\]"
                stack.enter_context(pytest.raises(ValueError, match=text))
            build_chunks(layout, groups, tied, depths)

    values(run_ranks(V_RANKS, refused))


def test_multi_token_prediction_outside_the_embedding_group_is_refused_on_a_line() -> None:
    """A step on a linear placement is refused if the last rank has a copy of the embedding for
    multi-token prediction and is not in the caller's embedding group. Megatron would not add up the
    gradients of the two copies, and the copies would drift apart."""
    line = [LINE_LAYOUT[0], [*LINE_LAYOUT[1][:-1], "mtp", "loss"]]

    def refused(rank: int) -> None:
        with apply(cpu.patches()), megatron_ext.install(schedule="zb-h1"):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=V_RANKS)
            model_parallel_cuda_manual_seed(0)
            groups = ProcessGroupCollection.use_mpu_process_groups()
            alone = dist.new_group([0])
            groups.embd = alone if rank == 0 else None
            chunks = build_chunks(line, groups, depths=1)
            text = r"rank 1 shares .* rank 0, .* ranks \[\]"
            error, match = (ValueError, text) if rank == 1 else (RuntimeError, None)
            with pytest.raises(error, match=match):  # rank 0 only learns that its peer has ended
                run_step(chunks)

    values(run_ranks(V_RANKS, refused))


@COPIES
def test_copies_that_differ_are_refused_before_the_first_pass(
    layout: list[list[str]], tied: bool, depths: int | None
) -> None:
    """Copies of a tied embedding that differ are refused before the first pass. A caller that
    builds the chunks itself, as Megatron-Bridge does, has to make the copies equal."""

    def refused(rank: int) -> None:
        with apply(cpu.patches()), megatron_ext.install(schedule="zb-v"):
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=V_RANKS)
            model_parallel_cuda_manual_seed(0)
            chunks = build_chunks(layout, tied=tied, depths=depths)
            copies = tied_weights(chunks)
            assert (copies is not None) == (rank == V_RANKS - 1)
            if copies is not None:
                with torch.no_grad():
                    copies[1].zero_()  # zeros, as Megatron initializes the copy
            differ = "the pipeline's copies of the embedding differ"
            with pytest.raises(ValueError, match=differ):
                run_step(chunks)
            if copies is not None:
                with torch.no_grad():
                    copies[1].copy_(copies[0])
            assert len(run_step(chunks)) == (MICROBATCHES if copies else 0)
            # The process builds a second model, as a critic next to an actor.
            second = build_chunks(layout, tied=tied, depths=depths)
            if (others := tied_weights(second)) is not None:
                with torch.no_grad():
                    others[1].zero_()
            with pytest.raises(ValueError, match=differ):
                run_step(second)

    values(run_ranks(V_RANKS, refused))
