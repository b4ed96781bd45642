"""Execution of a rank's part of a program: one loop, with a handler for each kind of action.

No order is decided here: a row runs in the order that was proved valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_ext.compile.program.verify import Program
from megatron_ext.runtime.messages.peer_call import PeerFailure
from megatron_ext.runtime.owner import Handler, Owner, RestartStep
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.stage import RunnableStage
from megatron_ext.runtime.stage_io import Messages, PipelineEnds, StageIO
from megatron_ext.runtime.stage_passes import PassContext, StagePasses
from megatron_ext.schedule.action import Action, Kind, OverlappedPasses
from megatron_ext.schedule.kinds import RULES

NEIGHBOURS = 4  # actions that an error message shows before and after a failing action


def execute(
    program: Program,
    stages: Mapping[int, RunnableStage],
    transport: Messages,
    recorder: Recorder,
    others: Sequence[Owner] = (),
    ends: PipelineEnds | None = None,
    context: PassContext | None = None,
) -> None:
    """Run one step of ``program`` on this rank, without the optimizer's step.

    Args:
        program: the proved program, equal on every rank.
        stages: the stages of this rank, by number.
        transport: sends and receives the messages of the step.
        recorder: recorder that is notified of every pass and wait.
        others: owners of further kinds of action, which features add to the program.
        ends: sources and sinks of the first and the last stage's tensors, in place of data and
            loss.
        context: work of a feature before and after each pass of a stage.

    Raises:
        PeerFailure: another rank has failed.
        Exception: an exception of a stage passes through, with notes that name the action and show
            its neighbours in the rank's row. In both cases the channels are closed, so that all
            ranks fail.
    """
    placement, first_trained_stage = program.schedule.placement, program.problem.first_trained_stage
    stage_io = StageIO(placement, stages, transport, ends, first_trained_stage)
    passes = StagePasses(stages, stage_io, recorder, context)
    owners = [stage_io, passes, *others]
    _Execution(program, transport.rank, stages, recorder, owners, passes.run_overlapped).run()


def neighbourhood(row: Sequence[Action | OverlappedPasses], place: int) -> str:
    """Return the failing action at ``place`` of ``row``, between its neighbours, as text."""
    first, end = max(0, place - NEIGHBOURS), place + 1 + NEIGHBOURS
    before, after = map(str, row[first:place]), map(str, row[place + 1 : end])
    words = [*before, f"{row[place]} <-- ERROR HERE,", *after]
    return " ".join([*["..."] * (first > 0), *words, *["..."] * (end < len(row))])


class _Execution:
    """Execution of one step on one rank; each of ``owners`` handles some kinds of action."""

    def __init__(
        self,
        program: Program,
        rank: int,
        stages: Mapping[int, RunnableStage],
        recorder: Recorder,
        owners: Sequence[Owner],
        run_overlapped: Callable[[OverlappedPasses], None] | None = None,
    ) -> None:
        """Initialise the execution.

        ``run_overlapped`` runs a forward and a backward pass as one.
        """
        self.rank = rank
        schedule = program.schedule
        row = [action for action in schedule.rows[rank] if not RULES[action.kind].by_optimizer]
        self.row = _with_pairs(row, schedule.overlapped_with)
        self.microbatches = program.problem.microbatches
        self.stages = stages
        self.recorder = recorder
        self.owners = owners
        self.handlers: dict[Kind, Handler] = {}
        for owner in owners:
            self.handlers |= owner.handlers()
        self.run_overlapped = run_overlapped
        self.place, self.action = 0, self.row[0]  # position in the row, and the action that runs
        self.last_gradient = {
            action.stage: action for action in row if RULES[action.kind].adds_to_gradients
        }

    def run(self) -> None:
        self.recorder.in_step = True
        try:
            self.run_until_it_counts()
            for owner in self.owners:
                owner.finish()
            # The step ends before other ranks' failures are checked, so that an interruption comes
            # either before the step's end or after it.
            self.recorder.in_step = False
            self.check_others()
        except BaseException as error:
            self.recorder.in_step = False
            self.recorder.failed(error, self.action)
            if not isinstance(error, PeerFailure):
                error.add_note(f"megatron_ext: its row: {neighbourhood(self.row, self.place)}")
            if isinstance(error, StopIteration):
                error.add_note(
                    f"megatron_ext: the data iterator has ended; a step of "
                    f"{self.microbatches} microbatches takes as many items"
                )
            for owner in self.owners:
                owner.abandon()
            raise

    def run_until_it_counts(self) -> None:
        try:
            self.run_row()
            return
        except RestartStep:
            self.forget()
        self.run_row()

    def run_row(self) -> None:
        # A chunk's gradient reduction starts after that of the next chunk of the model, whatever
        # the program's order: data-parallel ranks may run different programs, and must start
        # reductions in one order.
        unreduced, complete = sorted(self.last_gradient), set[int]()
        for place, action in enumerate(self.row):
            self.place, self.action = place, action
            self.check_others()
            self.perform(action)
            if isinstance(action, OverlappedPasses):
                action = action.backward
            if self.last_gradient.get(action.stage) == action:
                complete.add(action.stage)
                while unreduced and unreduced[-1] in complete:
                    self.stages[unreduced.pop()].gradients_complete()

    def perform(self, action: Action | OverlappedPasses) -> None:
        if isinstance(action, OverlappedPasses):
            assert self.run_overlapped is not None, f"nobody runs {action}"
            self.run_overlapped(action)
            return
        handler = self.handlers.get(action.kind)
        assert handler is not None, f"nobody runs {action}"
        handler(action)

    def check_others(self) -> None:
        """Raise PeerFailure if another rank has failed.

        Tensors received since then may be garbage.
        """
        if self.recorder.interruption is not None:
            raise PeerFailure(
                f"pipeline rank {self.rank} was at {self.action} when another rank failed: "
                f"{self.recorder.interruption}"
            )

    def forget(self) -> None:
        """Discard all results of the step so far, because the step restarts."""
        for owner in self.owners:
            owner.forget()
        self.recorder.forget()


def _with_pairs(
    row: Sequence[Action], overlapping: Mapping[Action, Action]
) -> list[Action | OverlappedPasses]:
    """Return ``row`` with overlapping forward and backward passes merged into `OverlappedPasses`.

    The backward pass follows its forward pass directly in ``row``; ``overlapping`` maps each of the
    two to the other.
    """
    made: list[Action | OverlappedPasses] = []
    for action in row:
        if action not in overlapping:
            made.append(action)
        elif action.kind is not Kind.FORWARD:
            made.append(OverlappedPasses(overlapping[action], action))
    return made
