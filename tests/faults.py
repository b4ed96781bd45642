"""Faults that the tests must catch: each is seeded in a copy of this checkout, where tests then
run.

python -m tests.faults                       # all of them: some ten minutes
python -m tests.faults lost-wait early-free  # these
python -m tests.faults --list

If tests are removed or made faster, these faults show whether the rest still catches the same
errors: a wrong sign, a wrong microbatch, memory freed too early, a missing wait, a missing refusal.
The exit code is 0 only if every fault was caught by the tests named for it. The copy has the
checkout's changes, as far as git knows the files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SCHEDULE = "megatron_ext/schedule"
PROGRAM = "megatron_ext/compile/program"
RUNTIME = "megatron_ext/runtime"
SHARED = "megatron_ext/features/shared_prompts/runtime"
ADAPTER = "megatron_ext/adapter"
MEGATRON = "patches/megatron"

ORDER = "tests/pipeline/features/test_microbatch_order.py"
PLACES = "tests/pipeline/training/test_places.py"
PACKS = "tests/patches/adapter/test_slices_of_packs.py"
PROMPTS = "tests/patches/features/test_shared_prompts.py"
SPARSE = (
    "tests/pipeline/training/test_slices.py::"
    "test_sparse_attention_chooses_among_the_keys_of_earlier_slices"
)
PREDICTION = (
    "tests/pipeline/training/test_multi_token_prediction.py::test_it_is_stock_to_the_last_bit"
)


@dataclass(frozen=True)
class Fault:
    """A fault: ``old``, which occurs once in ``file``, becomes ``new``, and then one of ``tests``
    must fail.

    ``tests`` are arguments of pytest: files, or single tests of a file.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def seed(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: {self.file} has changed"
        path.write_text(text.replace(self.old, self.new))


FAULTS = (
    # --- the proof, and times and peaks of a schedule before it runs
    Fault(
        "memory-never-given-back",
        f"{PROGRAM}/memory.py",
        "held += (gained - lost) * tokens - given_back",
        "held += gained * tokens - given_back",
        ("tests/unit/program/test_verify.py",),
    ),
    Fault(
        "one-microbatch-over-the-limit",
        f"{PROGRAM}/verify.py",
        "if not fits(peak, allowed):",
        "if not fits(peak, allowed + 1):",
        ("tests/unit/program/test_verify.py",),
    ),
    Fault(
        "a-limit-of-the-larger",
        f"{SCHEDULE}/limit.py",
        "number * min(ranks, microbatches)",
        "number * max(ranks, microbatches)",
        ("tests/unit/schedule/test_costs.py",),
    ),
    Fault(
        "one-microbatch-too-many",
        f"{PROGRAM}/verify.py",
        "if not 0 <= action.microbatch < problem.pieces:",
        "if not 0 <= action.microbatch <= problem.pieces:",
        ("tests/unit/program/test_verify.py",),
    ),
    Fault(
        "a-pass-twice-is-not-refused",
        f"{PROGRAM}/verify.py",
        "if work in done:",
        "if False:",
        ("tests/unit/program/test_verify.py",),
    ),
    Fault(
        "a-need-one-place-later",
        f"{PROGRAM}/verify.py",
        "if part is not None and position.get((stage, kind, part), -1) > index:",
        "if part is not None and position.get((stage, kind, part), -1) > index + 1:",
        ("tests/unit/program/test_verify.py",),
    ),
    Fault(
        "messages-that-cross-are-not-refused",
        f"{PROGRAM}/verify.py",
        "if partner != receive:",
        "if False:",
        ("tests/unit/program/test_verify.py",),
    ),
    Fault(
        "collectives-that-cross-are-not-refused",
        f"{PROGRAM}/verify.py",
        "if first.microbatch != other.microbatch:",
        "if False:",
        ("tests/unit/transforms/test_vocabulary_schedule.py",),
    ),
    Fault(
        "one-queue-is-not-looked-at",
        f"{PROGRAM}/verify.py",
        "one_queue = build_graph(schedule, p2p, Device.ONE_QUEUE)",
        "one_queue = build_graph(schedule, p2p)",
        ("tests/unit/program/test_message_order.py",),
    ),
    Fault(
        "a-loss-before-the-verdict",
        f"{PROGRAM}/speculation.py",
        "return RULES[action.kind].in_evaluation and not placement.is_last(action.stage)",
        "return RULES[action.kind].in_evaluation",
        ("tests/unit/transforms/test_post_validation.py",),
    ),
    Fault(
        "links-are-not-shared",
        f"{PROGRAM}/simulate.py",
        "start[node] = max(start[node], free.get(link, 0.0))",
        "start[node] = max(start[node], 0.0)",
        ("tests/unit/transforms/test_offload.py",),
    ),
    Fault(
        "waves-the-other-way",
        f"{SCHEDULE}/placement.py",
        "(there + back) * waves",
        "(back + there) * waves",
        ("tests/unit/families/test_v_families.py",),
    ),
    # --- the runtime of a rank
    Fault(
        "a-send-that-nobody-waits-for",
        f"{RUNTIME}/stage_io.py",
        "self._transport.wait_sent(action._replace(kind=Kind.SEND_F))",
        "pass",
        ("tests/pipeline/runtime/test_executor.py",),
    ),
    Fault(
        "gradient-of-another-microbatch",
        f"{RUNTIME}/stage_io.py",
        "self._transport.send(action, self.gradients[action.stage, action.microbatch])",
        "self._transport.send(action, next(iter(self.gradients.values())))",
        ("tests/pipeline/runtime/test_executor.py",),
    ),
    Fault(
        "gradients-complete-too-early",
        f"{RUNTIME}/executor.py",
        "action for action in row if RULES[action.kind].adds_to_gradients",
        "action for action in row[::-1] if RULES[action.kind].adds_to_gradients",
        ("tests/pipeline/runtime/test_executor.py",),
    ),
    Fault(
        "a-receive-that-nobody-waits-for",
        f"{RUNTIME}/messages/transport.py",
        "            work.wait()\n        return tensor\n",
        "            pass\n        return tensor\n",
        ("tests/pipeline/runtime/test_adversary.py",),
    ),
    Fault(
        "a-batch-that-nobody-waits-for",
        f"{RUNTIME}/messages/batched.py",
        "                work.wait()\n        batch.works.clear()\n",
        "                pass\n        batch.works.clear()\n",
        ("tests/pipeline/runtime/test_adversary.py",),
    ),
    Fault(
        "a-batch-to-the-wrong-rank",
        f"{RUNTIME}/messages/batched.py",
        "(dist.isend, channel.receiver) if sends",
        "(dist.isend, channel.sender) if sends",
        ("tests/pipeline/runtime/test_executor.py",),
    ),
    Fault(
        "a-sum-for-the-wrong-rank",
        f"{RUNTIME}/messages/collectives.py",
        "dist.reduce(\n            tensor, self._global_ranks[root]",
        "dist.reduce(\n            tensor, self._global_ranks[-1 - root]",
        ("tests/pipeline/features/test_vocabulary.py::test_training",),
    ),
    Fault(
        "labels-are-added",
        "megatron_ext/features/vocabulary/runtime/shard.py",
        "softmax.gather(-1, rows) - is_here.float()",
        "softmax.gather(-1, rows) + is_here.float()",
        ("tests/unit/runtime/test_vocabulary_shard.py",),
    ),
    Fault(
        "a-shard-one-row-too-long",
        "megatron_ext/features/vocabulary/runtime/shard.py",
        "is_here = (rows >= 0) & (rows < self.rows)",
        "is_here = (rows >= 0) & (rows <= self.rows)",
        ("tests/unit/runtime/test_vocabulary_shard.py",),
    ),
    Fault(
        "shards-that-are-not-summed",
        "megatron_ext/features/vocabulary/runtime/shard.py",
        "        dist.all_reduce(gradient, group=shard.tensor_parallel)\n",
        "",
        ("tests/pipeline/features/test_vocabulary.py::test_training_with_tensor_parallel_ranks",),
    ),
    Fault(
        "memory-freed-before-its-copy-has-ended",
        "megatron_ext/features/offload/runtime/offload.py",
        "        _wait(away.copy, away.transfer)\n",
        "",
        ("tests/pipeline/runtime/test_adversary.py", "tests/pipeline/features/test_offload.py"),
    ),
    Fault(
        "the-state-of-this-rank-alone",
        "megatron_ext/features/post_validation/runtime/partial_state.py",
        "self.squared_norm + other.squared_norm",
        "other.squared_norm",
        ("tests/pipeline/features/test_post_validation.py",),
    ),
    # --- patches of Megatron
    Fault(
        "recomputed-uses-are-summed",
        f"{RUNTIME}/weight_gradients.py",
        "backward = torch._C._current_graph_task_id()",
        "backward = 0",
        (PREDICTION,),
    ),
    Fault(
        "a-head-that-is-looked-up-waits",
        f"{ADAPTER}/job.py",
        "return with_input_gradient(costs) if job.is_looked_up else costs",
        "return costs",
        (PREDICTION,),
    ),
    Fault(
        "predictions-copy-of-the-embedding-is-forgotten",
        f"{ADAPTER}/tied.py",
        'is_tied or getattr(last, "mtp_process", False)',
        "is_tied",
        (PREDICTION,),
    ),
    Fault(
        "predictions-copy-starts-with-zeros",
        f"{ADAPTER}/tied.py",
        "last.copy_(first)",
        "pass",
        (
            "tests/pipeline/training/test_multi_token_prediction.py::test_the_copies_start_equal_on_a_v",
        ),
    ),
    Fault(
        "weights-descend-the-wrong-way",
        f"{MEGATRON}/core/tensor_parallel/layers.py",
        "return dy.t().matmul(x)",
        "return -dy.t().matmul(x)",
        ("tests/pipeline/callers/test_callers.py::test_gradients_and_losses_are_stocks",),
    ),
    Fault(
        "half-of-a-weight-that-is-used-twice",
        f"{RUNTIME}/weight_gradients.py",
        "return gradient + contribution",
        "return gradient",
        ("tests/patches/layers/test_transformer_engine.py",),
    ),
    Fault(
        "segments-lie-as-in-a-loop",
        f"{MEGATRON}/core/models/hybrid/hybrid_layer_allocation.py",
        "placement.stages_of[pp_group.rank()][vp_stage or 0]",
        "(vp_stage or 0) * pp_group.size() + pp_group.rank()",
        ("tests/pipeline/training/test_hybrid_models.py::test_steps_are_stocks",),
    ),
    Fault(
        "tied-gradients-overwritten",
        f"{MEGATRON}/core/distributed/finalize_model_grads.py",
        "first.add_(last)",
        "first.copy_(last)",
        (
            "tests/pipeline/training/test_placements.py::test_resumed_training_is_stock_to_the_last_bit",
        ),
    ),
    Fault(
        "padding-is-counted-on",
        f"{MEGATRON}/core/optimizer/distrib_optimizer.py",
        "padding = bucket.grad_data.numel() - bucket.numel_unpadded",
        "padding = 0",
        ("tests/pipeline/training/test_checkpoints.py::test_states_behind_padding",),
    ),
    Fault(
        "states-of-another-placement-are-not-refused",
        f"{ADAPTER}/checkpoints/loading.py",
        "if (then, was_divided) != (rank_of_stage, command.divided):",
        "if was_divided != command.divided:",
        ("tests/pipeline/training/test_checkpoints.py::test_another_placement_is_refused",),
    ),
    Fault(
        "tokens-of-one-replica",
        "megatron_ext/features/post_validation/adapter/restartable_step.py",
        "    dist.all_reduce(total, group=replicas)\n",
        "",
        (
            "tests/pipeline/features/test_post_validation_training.py::test_clips_on_every_third_step",
        ),
    ),
    Fault(
        "a-tower-is-laid-out-as-the-language-model",
        f"{MEGATRON}/core/transformer/pipeline_parallel_layer_layout.py",
        "if model_config.pipeline_model_parallel_size > 1:",
        "if True:",
        ("tests/pipeline/training/test_any_model.py::test_a_tower_on_the_first_stage",),
    ),
    Fault(
        "wrappers-are-not-followed",
        f"{ADAPTER}/model_parts.py",
        '_WITHIN = ("module", "language_model", "thinker")',
        '_WITHIN = ("module",)',
        (
            "tests/patches/adapter/test_model_parts.py::test_a_language_model_is_found_in_its_wrappers",
            "tests/patches/adapter/test_model_parts.py::test_sizes",
        ),
    ),
    Fault(
        "one-sequence-length-is-taken-for-the-other",
        f"{ADAPTER}/step/call.py",
        "if len(self.models) > 1 and self.decoder_seq_length not in (None, self.seq_length):",
        "if False:",
        (
            "tests/pipeline/training/test_any_model.py::"
            "test_with_several_chunks_either_sequence_length_may_be_meant",
        ),
    ),
    Fault(
        "frozen-weights-cost-as-trained-ones",
        "megatron_ext/cost_model/frozen.py",
        "if reached == 1 and output_layer and all(share == 1 for share in matrices):",
        "if True:",
        (
            "tests/patches/adapter/test_model_parts.py::"
            "test_costs_leave_out_what_is_not_done_for_frozen_weights",
        ),
    ),
    Fault(
        "shapes-that-vary-are-batched",
        f"{ADAPTER}/step/call.py",
        "if ours.p2p is P2P.BATCHED:",
        "if False:",
        (
            "tests/pipeline/callers/test_callers.py::test_varying_sequence_lengths_cannot_be_batched",
        ),
    ),
    Fault(
        "an-output-that-was-changed-is-not-refused",
        "megatron_ext/features/vocabulary/adapter/end_stage.py",
        "len(stand_in.calls) != 1 or output is not stand_in.output",
        "len(stand_in.calls) != 1",
        ("tests/pipeline/features/test_vocabulary_callers.py::test_it_is_refused",),
    ),
    Fault(
        "random-states-are-not-put-back",
        "megatron_ext/features/post_validation/adapter/restartable_step.py",
        "            _restore(self._random)\n",
        "            pass\n",
        (
            "tests/pipeline/features/test_post_validation_training.py::test_clips_on_every_third_step",
        ),
    ),
    Fault(
        "a-step-that-is-skipped-is-taken",
        "megatron_ext/features/post_validation/adapter/optimizer.py",
        "return norm < config.grad_norm_skip_threshold * (1 - _MARGIN)",
        "return True",
        ("tests/patches/features/test_speculation.py",),
    ),
    Fault(
        "nothing-is-kept-but-by-the-last",
        "megatron_ext/features/post_validation/adapter/pending.py",
        "self._optimizer.step(keep=not messages.is_last)",
        "self._optimizer.step(keep=messages.is_last)",
        ("tests/patches/features/test_post_validation.py",),
    ),
    # --- slices of packed sequences
    Fault(
        "documents-attend-from-the-first-token",
        f"{ADAPTER}/slices/packs.py",
        "    begin = pack.borders[first]\n",
        "    begin = 0\n",
        (f"{PACKS}::test_each_token_attends_to_its_document_up_to_itself",),
    ),
    Fault(
        "positions-that-go-on-in-the-next-document",
        f"{ADAPTER}/slices/packs.py",
        "    return (tokens - borders[document]).long()",
        "    return (tokens - span.begin).long()",
        (f"{PACKS}::test_losses_and_gradients_are_those_of_whole_packs",),
    ),
    Fault(
        "predictions-of-the-next-document",
        f"{ADAPTER}/slices/further_predictions.py",
        '"labels", "loss_mask", "input_ids", "packed_seq_params"',
        '"labels", "loss_mask", "input_ids"',
        (f"{PACKS}::test_losses_and_gradients_are_those_of_whole_packs",),
    ),
    Fault(
        "tokens-of-the-next-document",
        f"{ADAPTER}/slices/further_predictions.py",
        'kwargs |= whole_call.arguments("packed_seq_params")',
        "kwargs |= {}",
        (f"{PACKS}::test_losses_and_gradients_are_those_of_whole_packs",),
    ),
    Fault(
        "gradients-of-another-document",
        f"{RUNTIME}/slices/running_slice.py",
        "before[begin : span.local.end] += gradient",
        "before[: len(gradient)] += gradient",
        (f"{PACKS}::test_losses_and_gradients_are_those_of_whole_packs",),
    ),
    # --- prompts that answers share
    Fault(
        "positions-that-go-on-in-the-next-answer",
        f"{SHARED}/rows.py",
        "range(self._before(segment), self._before(segment) + segment.length)",
        "range(segment.begin, segment.end)",
        (f"{PROMPTS}::test_losses_and_gradients_are_those_of_sequences_apart",),
    ),
    Fault(
        "answers-attend-to-earlier-answers",
        f"{SHARED}/rows.py",
        "[*range(parent.begin, parent.end), *itself]",
        "[*range(parent.begin, segment.end)]",
        (f"{PROMPTS}::test_losses_and_gradients_are_those_of_sequences_apart",),
    ),
    Fault(
        "a-prompts-last-token-once",
        f"{SHARED}/rows.py",
        "prefix = prompts[first] - 1 if",
        "prefix = prompts[first] if",
        (f"{PROMPTS}::test_losses_and_gradients_are_those_of_sequences_apart",),
    ),
    Fault(
        "losses-of-a-prefix-from-its-first-token",
        f"{SHARED}/rows.py",
        "            places[begin : begin + prefix] = range(at, at + prefix)",
        "            places[begin : begin + prefix] = [at] * prefix",
        (f"{PROMPTS}::test_losses_and_gradients_are_those_of_sequences_apart",),
    ),
    Fault(
        "gradients-of-a-prefix-twice",
        f"{SHARED}/attended.py",
        "for tokens, copied in attended.copies:",
        "for tokens, copied in attended.copies * 2:",
        (f"{PROMPTS}::test_losses_and_gradients_are_those_of_sequences_apart",),
    ),
    Fault(
        "copies-of-a-prefix-saved",
        f"{SHARED}/attended.py",
        "number = numbers.get(tensor.untyped_storage().data_ptr())",
        "number = None",
        (f"{PROMPTS}::test_autograd_saves_no_copy_of_a_prefix",),
    ),
    # --- slices of sparse attention
    Fault(
        "queries-of-a-slice-as-the-first",
        f"{ADAPTER}/slices/sparse_attention.py",
        "torch.arange(span.begin, span.end, device=device)",
        "torch.arange(span.end - span.begin, device=device)",
        (SPARSE,),
    ),
    Fault(
        "an-indexers-loss-for-each-slice",
        f"{ADAPTER}/slices/sparse_attention.py",
        "coefficient * (span.end - span.begin) / span.length",
        "coefficient",
        (SPARSE,),
    ),
    # --- microbatches in another order, stages and ranks that differ
    Fault(
        "ranks-that-swap-programs-at-other-steps",
        f"{ADAPTER}/step/pipeline_training.py",
        "self._programs.check_swap(call.pipeline, key, known)",
        "pass",
        (f"{PLACES}::test_a_rank_that_swaps_a_step_late_ends_the_training",),
    ),
    Fault(
        "bytes-of-the-median-microbatch",
        f"{RUNTIME}/measure/profile.py",
        "self._counting.per_microbatch(largest=places is not None)",
        "self._counting.per_microbatch()",
        (f"{PLACES}::test_memory_is_that_of_the_largest_microbatch",),
    ),
    Fault(
        "ranks-that-order-microbatches-differently",
        "megatron_ext/features/arrangement/adapter/arranged_batches.py",
        "        if found != entry:\n",
        "        if False:\n",
        (f"{ORDER}::test_ranks_that_order_differently_end_the_training",),
    ),
    Fault(
        "microbatches-in-order-of-arrival",
        "megatron_ext/features/arrangement/adapter/arranged_batches.py",
        "for number in rows[replica].tolist():",
        "for number in np.sort(rows[replica]).tolist():",
        (ORDER,),
    ),
    Fault(
        "results-in-the-order-of-the-step",
        f"{ADAPTER}/step/ordered_calls.py",
        "return [by_arrival[place] for place in range(number)]",
        "return results",
        (f"{ORDER}::test_a_caller_orders_its_own_microbatches",),
    ),
    Fault(
        "a-tower-that-costs-nothing",
        "megatron_ext/cost_model/estimate.py",
        "        costs = costs.with_tower(tower)\n",
        "        pass\n",
        ("tests/unit/model/test_tower.py",),
    ),
    Fault(
        "rank-speeds-that-do-nothing",
        f"{ADAPTER}/job.py",
        "costs = at_speeds(costs, job.placement, ranks)",
        "assert ranks",
        ("tests/pipeline/features/test_rank_speeds.py",),
    ),
    Fault(
        "speeds-applied-twice",
        "megatron_ext/planner/layouts/stage_figures.py",
        "            figures[..., :_SECONDS] *= slowness[:, None]\n",
        "            figures[..., :_SECONDS] *= slowness[:, None] ** 2\n",
        ("tests/unit/plan/test_layouts.py::test_an_order_is_timed_as_it_is_simulated",),
    ),
)


def copied(folder: Path) -> Path:
    """Copy this checkout, with its changes and without ignored files, and return the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    for name in os.fsdecode(listed.stdout).split("\0"):
        source = ROOT / name
        if not name or not (source.is_file() or source.is_symlink()):
            continue
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    fetched = ROOT / "build"
    if fetched.exists():
        (folder / "build").symlink_to(fetched)
    return folder


def failed(folder: Path, tests: tuple[str, ...]) -> Iterator[str]:
    """Yield the test that failed in ``folder``, if one did."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"pytest has not run the tests:\n{ended.stdout[-3000:]}")
    lines = ended.stdout.splitlines()
    yield from (line.split(" - ")[0] for line in lines if line.startswith("FAILED "))
    # An error in a fixture also ends `python -m tests.faults`: a fixture that fails even without
    # the fault would seem to catch every fault.
    for line in lines:
        if line.startswith("ERROR "):
            raise RuntimeError(f"a test did not run: {line}\n{ended.stdout[-3000:]}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the faults to seed; default: all")
    parser.add_argument(
        "--list", action="store_true", help="print the faults and their tests, and seed none"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {fault.name for fault in FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}: --list shows them")
    chosen = [fault for fault in FAULTS if not options.names or fault.name in options.names]
    if options.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.file}, by {' '.join(fault.tests)}")
        return 0
    missed = []
    for number, fault in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {fault.name} ... ", end="", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            fault.seed(copied(Path(folder)))
            by = list(failed(Path(folder), fault.tests))
        seconds = time.monotonic() - start
        print(f"{'caught' if by else 'NOT CAUGHT'} in {seconds:.0f} s {' '.join(by)}", flush=True)
        if not by:
            missed.append(fault.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
