"""Race of schedules in a training: choice of each step's schedule, and timing of the schedules.

All ranks make the same decisions: they decide together, and only at training steps whose numbers
all of them know. A single pipeline may have steps of another size, or be interrupted: its ranks
report that at the next meeting of all ranks, and run the baseline until then.
"""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron_ext.adapter.observers.observer import Step, StepObserver
from megatron_ext.adapter.programs import BatchShape, Programs
from megatron_ext.adapter.step.call import Call
from megatron_ext.adapter.step.connections import Connections
from megatron_ext.adapter.training_globals import checkpoint_folder, training_global
from megatron_ext.base.logger import logger
from megatron_ext.compile.contestants import RaceThen
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import PipelineConfig
from megatron_ext.features.race.adapter.fingerprint import run_fingerprint
from megatron_ext.features.race.adapter.turn import Turn
from megatron_ext.observe.prediction import Comparison
from megatron_ext.race import race_texts
from megatron_ext.race.eligibility import check_microbatch_order
from megatron_ext.race.race_record import (
    NAME,
    THE_RACE,
    RaceFigures,
    RaceRecord,
    first_difference,
    load_race_record,
    save_race_record,
)
from megatron_ext.race.rounds import ROUNDS, TIMED, WARM_UP, Race
from megatron_ext.runtime.host.host_memory import HostMemory
from megatron_ext.runtime.world import gather_from_all, told_by_rank_0

FIRST = 2  # first iterations without a race, in which caches fill and kernels load

# Sizes of the raced steps: micro-batch size, sequence length, number of microbatches.
_Key = tuple[int, int, int]


@dataclass(frozen=True)
class _MeetingMessage:
    """Message that a rank sends to all other ranks when they decide the race's next turn.

    Attributes:
        is_steady: whether all steps since counting began had one size.
        waits: whether costs have yet to be measured.
        other: why measurements of an earlier start do not count here; "" if they do.
        missing: iterations that the current turn lacks.
        seconds: seconds of an iteration of the current turn.
        peak: peak bytes of activations in the current turn.
    """

    is_steady: bool
    waits: bool
    other: str
    missing: int = 0
    seconds: float = 0.0
    peak: float = 0.0


class StepRace(StepObserver[Step]):
    """Observer that races the schedules of ``config``, whose programs are in ``programs``."""

    def __init__(self, config: PipelineConfig, programs: Programs) -> None:
        assert config.race is not None
        self._config = config
        self._contestants = config.race
        self._resolved_specs = dict(zip(config.race.specs, config.race.resolved_specs, strict=True))
        self._programs = programs
        self._count = 0  # number of training steps so far
        self._meets = 1  # training step before which all ranks next exchange measurements
        # Number of steps until the next exchange of measurements, unless a schedule is timed
        # earlier.
        self._pause = FIRST
        self._key: _Key | None = None
        self._is_steady = True  # whether all steps so far had the same sizes
        self._facts: dict[str, str] = {}  # fingerprint of this run
        # Record of a race in an earlier start of this training.
        self._known: RaceRecord | None = None
        # Whether the record of the earlier race has the fingerprint of this run.
        self._knows = False
        self._race: Race | None = None
        self._turn: Turn | None = None
        self._made: dict[str, Program] = {}
        self._bubbles: dict[str, list[float]] = defaultdict(list)
        self._peaks: dict[str, float] = {}
        self._kept: str | None = None  # schedule under which the training goes on after the race
        self._is_written = True

    # ---- Choice of the schedule for a step

    def choose(
        self,
        call: Call,
        shape: BatchShape,
        make: Callable[[], Program],
        connections: Connections | None,
    ) -> None:
        """Select the schedule of the training step that begins now.

        ``make`` builds the schedule's program. ``connections`` are the rank's connections to other
        ranks; None before the first step. Collective over the world at steps that all ranks know.
        """
        spec = self._kept or self._next(call, shape, make, connections)
        self._programs.resolved_spec = self._resolved_specs[spec]

    def interrupt(self) -> None:
        """Exclude the current iteration from the race, as an evaluation or a save follows."""
        if self._turn is not None:
            self._turn.interrupt()

    def _next(
        self,
        call: Call,
        shape: BatchShape,
        make: Callable[[], Program],
        connections: Connections | None,
    ) -> str:
        self._count += 1
        self._size_up(call)
        if self._turn is not None:
            self._turn.begin_iteration()
        if self._count == self._meets:
            self._meet(call, shape, make, connections)
        if self._kept is not None:
            return self._kept
        if self._race is None or not self._is_steady:
            return self._at_first(shape)
        return self._race.current

    def _size_up(self, call: Call) -> None:
        """Note the size of the step that begins, since steps of two sizes cannot be compared."""
        key = call.micro_batch_size, call.seq_length, call.num_microbatches
        if key == self._key:
            return
        self._is_steady = self._key is None
        self._key = key
        self._facts = run_fingerprint(call, self._config)

    def _meet(
        self,
        call: Call,
        shape: BatchShape,
        make: Callable[[], Program],
        connections: Connections | None,
    ) -> None:
        """Decide, with all ranks, under which schedule the next turn of the race runs.

        Collective over the world.
        """
        if self._count == 1:
            self._known = self._recall()
        gathered = gather_from_all(self._message(shape))
        if self._count == 1:
            self._begin_anew(gathered)
            self._meets += FIRST
            return
        missing = max(message.missing for message in gathered)
        if not all(message.is_steady for message in gathered):
            self._begin_anew(gathered)
        elif self._race is None and not any(message.waits for message in gathered):
            assert connections is not None
            self._begin(make, connections.host_memory)
        elif self._race is not None and missing:
            self._meets += missing
            return
        elif self._race is not None:
            self._end_turn(gathered, call)
            self._pause = FIRST
        self._is_steady = True
        if self._kept is not None:
            return
        if self._race is not None:
            self._turn = Turn(_device())
            self._turn.begin_iteration()
            self._meets += WARM_UP + TIMED
        else:  # while sizes keep changing, ranks exchange measurements less and less often
            self._meets += self._pause
            self._pause *= 2

    def _message(self, shape: BatchShape) -> _MeetingMessage:
        """Return the message of this rank for a meeting of all ranks."""
        known = self._known
        other = "" if known is None else first_difference(self._fingerprint, known.fingerprint)
        message = _MeetingMessage(self._is_steady, self._waits_for_costs(shape), other)
        if self._turn is None or not self._is_steady:
            return message
        if self._turn.missing:
            return replace(message, missing=self._turn.missing)
        return replace(message, seconds=self._turn.seconds(), peak=self._turn.peak)

    def _begin_anew(self, gathered: list[_MeetingMessage]) -> None:
        """Count iterations of the race from now on, because earlier times cannot be compared."""
        if self._race is not None:
            _say("race: the number or shape of microbatches has changed, and it begins anew")
        self._race, self._turn = None, None
        self._made, self._peaks = {}, {}
        self._bubbles.clear()
        other = next((message.other for message in gathered if message.other), "")
        self._knows = self._known is not None and not other
        if self._known is None:
            return
        if other:
            _say(f"race: what an earlier start has measured does not count: {other}")
        elif self._known.winner is not None:
            self._kept = self._known.winner if self._takes_winner else self._contestants.baseline
            _say(f"race: {self._known.winner} has won already, and this goes on under {self._kept}")

    def _waits_for_costs(self, shape: BatchShape) -> bool:
        return self._config.costs.profile is not None and not self._programs.are_measured(shape)

    def _at_first(self, shape: BatchShape) -> str:
        """Return the schedule under which steps run before the race.

        If the first steps measure costs, it is a schedule that splits off weight gradients, if the
        race has one.
        """
        splitting = [
            spec
            for spec, resolved in self._resolved_specs.items()
            if resolved.traits.splits_backward
        ]
        if splitting and self._waits_for_costs(shape):
            return splitting[0]
        return self._contestants.baseline

    def _begin(self, make: Callable[[], Program], host_memory: HostMemory) -> None:
        """Build the programs of all contestants, which proves that they fit the memory limit.

        Candidates that some rank cannot build are dropped. Collective over the world.
        """
        contestants = self._contestants
        self._race = race = Race(contestants.baseline, contestants.candidates)
        for spec in contestants.specs:
            if why := self._why_not(spec, make, host_memory):
                race.drop(spec, why)
                _say(f"race: {spec} is not in it: {why}")
        if self._known is not None and self._knows:
            for measured in self._known.rounds:
                race.add_round(measured)
            for spec, figures in self._known.figures.items():
                self._bubbles[spec].append(figures.bubble)
                self._peaks[spec] = figures.peak or 0
        before = f", {len(race.rounds)} of them from an earlier start" if race.rounds else ""
        _say(
            f"race of {', '.join(race.candidates) or 'nobody'} against {race.baseline} "
            f"({contestants.order_of_baseline}): {ROUNDS} rounds{before}, turns of "
            f"{WARM_UP + TIMED} iterations, {race.iterations_left} iterations at most"
        )
        if race.is_over:
            self._end()

    def _why_not(self, spec: str, make: Callable[[], Program], host_memory: HostMemory) -> str:
        """Build the program of ``spec``; return why some rank cannot, or "" if all can.

        A program that some rank cannot build takes no host memory on other ranks. Collective over
        the world.
        """
        self._programs.resolved_spec = self._resolved_specs[spec]
        planned, program, why = host_memory.planned, None, ""
        try:
            program = make()
            check_microbatch_order(program)
        except ValueError as error:
            if spec == self._contestants.baseline:
                raise
            why = str(error)
        whys = [why for why in gather_from_all(why) if why]
        if not whys:
            assert program is not None
            self._made[spec] = program
            return ""
        if program is not None:
            self._programs.forget(program)
        host_memory.give_back_to(planned)
        # All ranks wait for each other here, so that all have released this program before any rank
        # counts the memory of the next one.
        gather_from_all(None)
        return whys[0]

    # ---- Times of the raced schedules

    def begin(self, step: Step) -> None:
        if self._turn is not None:
            self._turn.begin_step(step.connections.recorder, step.call.models)

    def end(self, step: Step) -> None:
        if self._turn is not None:
            self._turn.end_step(step.connections.recorder, step.program)

    def _end_turn(self, gathered: list[_MeetingMessage], call: Call) -> None:
        """End a turn of the race, whose iterations every rank has timed.

        Collective over the pipeline.
        """
        race, turn = self._race, self._turn
        assert race is not None and turn is not None
        comparison = turn.steps.compare(call.pipeline)
        assert comparison is not None
        self._turn = None
        self._note(race.current, comparison, max(message.peak for message in gathered))
        race.end_turn(max(message.seconds for message in gathered))
        if not race.is_between_rounds:
            return
        _say(race_texts.standing(race))
        if race.is_over:
            self._end()
        else:
            self._write(None)

    def _note(self, spec: str, comparison: Comparison, peak: float) -> None:
        self._bubbles[spec].append(comparison.bubble_shares[1])
        self._peaks[spec] = max(peak, self._peaks.get(spec, 0))

    def _end(self) -> None:
        race, takes_winner = self._race, self._takes_winner
        assert race is not None
        self._kept = race.winner if takes_winner else self._contestants.baseline
        figures = self._figures()
        for spec, of_spec in figures.items():
            _say(race_texts.figures_line(spec, race, of_spec))
        _say(race_texts.winner_text(race, takes_winner))
        if doubt := race_texts.doubt_of_winner(race, figures):
            log_single_rank(logger, logging.WARNING, doubt)
        if table := race_texts.table(race, self._contestants, self._facts, figures):
            _say(f"race, to show to others:\n{table}")
        self._write(race.winner)

    @property
    def _takes_winner(self) -> bool:
        return self._config.race_then is RaceThen.WINNER

    @property
    def _fingerprint(self) -> dict[str, str]:
        return {**self._facts, THE_RACE: str(self._contestants)}

    def _figures(self) -> dict[str, RaceFigures]:
        return {
            spec: _beside_prediction(program, statistics.median(bubbles), self._peaks[spec])
            for spec, program in self._made.items()
            if (bubbles := self._bubbles.get(spec))
        }

    def finish(self, iteration: int) -> None:
        """Report that the race has not ended, because the training ends first."""
        if self._kept is not None:
            return
        rounds = 0 if self._race is None else len(self._race.rounds)
        path = _folder("save")
        then = "" if path is None else f"; a start from a checkpoint in {path} goes on with it"
        _say(f"race has not ended: the training has, after {rounds} of {ROUNDS} rounds{then}")

    # ---- Record of the race for the next start

    def _recall(self) -> RaceRecord | None:
        """Return the record of the race from an earlier start, as global rank 0 reads it.

        Collective over the world.
        """

        def read() -> RaceRecord | None:
            folder = _folder("load")
            if folder is None or not (folder / NAME).exists():
                return None
            try:
                return load_race_record(folder / NAME, self._contestants)
            except ValueError as error:
                logger.warning(f"race: measured anew: {error}")
                return None

        return told_by_rank_0(read)

    def _write(self, winner: str | None) -> None:
        folder, race = _folder("save"), self._race
        if dist.get_rank() != 0 or folder is None or race is None:
            return
        record = RaceRecord(self._fingerprint, race.rounds, self._figures(), winner)
        try:
            save_race_record(record, folder / NAME)
        except OSError as error:  # a full disk does not end a training
            if self._is_written:
                logger.error(f"what the race measures is not written to {folder / NAME}: {error}")
            self._is_written = False


def _beside_prediction(program: Program, bubble: float, peak: float) -> RaceFigures:
    costs, schedule = program.problem.costs, program.schedule
    predicted = None if costs.held_bytes is None else max(peaks(schedule, in_bytes(costs)))
    return RaceFigures(
        bubble,
        None if costs.no_estimate else simulate(program, costs).bubble_share_makespan,
        peak,
        predicted,
        max(peaks(schedule, in_microbatches(schedule))),
    )


def _device() -> torch.device:
    return torch.device(torch.cuda.current_device())


def _folder(name: str) -> Path | None:
    return checkpoint_folder(training_global("_GLOBAL_ARGS"), name)


def _say(text: str) -> None:
    log_single_rank(logger, logging.INFO, text)
