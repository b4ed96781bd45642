"""Short trainings of a real GPT through Megatron's own loop, on forked ranks.

The script, the launcher and Megatron are the ones that users run. Only the ranks are forked from a
parent that has imported torch and Megatron, so that a run costs seconds.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import itertools
import multiprocessing
import os
import runpy
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import random
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import arguments
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments
from megatron.training.global_vars import get_args

from megatron_ext.adapter.parity.digest import digest, dtype_of
from megatron_ext.adapter.parity.named_tensors import NamedTensors
from megatron_ext.adapter.parity.result_recorder import digests, logged_loss
from megatron_ext.compile.registry import entries
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.doctor.doctor import diagnose
from megatron_ext.patches import engine
from megatron_ext.patches.features import FEATURES
from megatron_ext.recordings.piece import Piece, Place
from megatron_ext.recordings.run_recording import readable_name
from tests.helpers import witnesses
from tests.helpers.covers.feature import Feature
from tests.helpers.ranks import (
    RankResult,
    agent_store,
    run_ranks,
    torchrun_environment,
    use_huge_pages,
    values,
)

SCRIPT = Path(__file__).parents[2] / "scripts" / "pretrain_gpt.py"

# Modules that are imported here, or each rank would import them. After the import they are hidden
# from the garbage collector, or each rank would copy their memory pages.
for _module in (
    "numpy.ma",
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.training.training",
    "megatron_ext.launch.script",
    "megatron_ext.launch.installation",
    "megatron_ext.patches.cpu",
    *(f"megatron_ext.patches.{name}" for feature in FEATURES for name in feature.modules),
):
    importlib.import_module(_module)
with contextlib.suppress(ModuleNotFoundError):  # Megatron 0.20 lacks this module
    importlib.import_module("megatron.core.tokenizers.text.models")
entries()  # this call imports the schedule families
runpy.run_path(str(SCRIPT), run_name="imported")


def _remember_docstrings() -> None:
    """Read the docstrings of Megatron's configs once; each rank would parse their sources for its
    --help, which takes a second."""
    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def remembered(factory: Any, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(factory, config)
        return dict(known[config])

    ArgumentGroupFactory._get_field_docstrings = remembered


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Copy the storage of ``recomputed``, where Megatron's recompute of single modules lets both
    tensors share one storage. Megatron compiles C++ for that, which takes a minute on a busy
    machine."""
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)


class _Attributes:
    """Remembers which modules hold a patched attribute.

    Each rank would otherwise look at the attributes of all modules, and so copy their pages. Each
    plan and each check of a launch command would do so as well, for most of its time. Modules that
    were imported before the ranks are forked get such attributes only from this project's engine of
    patches.
    """

    def __init__(self) -> None:
        self._holders: dict[int, set[types.ModuleType]] = {}
        self._last = ""  # name of the latest module that is known
        self._changed: set[types.ModuleType] = set()
        self._swap, self._look = engine._swap, engine.modules_with
        engine._swap, engine.modules_with = self._note, self._remembered

    def remember(self) -> None:
        """Remember the modules that have been imported by now."""
        for name in list(self._later()):
            module = sys.modules[name]
            for value in vars(module).values() if isinstance(module, types.ModuleType) else ():
                self._holders.setdefault(engine.identity_of(value), set()).add(module)
        self._last = next(reversed(sys.modules))

    def _later(self) -> Iterator[str]:
        return itertools.takewhile(lambda name: name != self._last, reversed(sys.modules))

    def _note(self, patch: Any, target: Any, handle: Any, aliases: Any) -> None:
        self._swap(patch, target, handle, aliases)
        self._changed.update(module for module, _ in handle._swaps[-1].importers)

    def _remembered(self, ids: Set[int], modules: Iterable[Any] = ()) -> list[types.ModuleType]:
        known = (self._holders[held] for held in ids if held in self._holders)
        places = [
            *itertools.chain.from_iterable(known),
            *self._changed,
            sys.modules["__main__"],  # module of the script that runs
            *map(sys.modules.__getitem__, self._later()),
        ]
        return self._look(ids, modules or set(places))


def _remember_sources() -> None:
    """Read and parse the patched functions once, instead of on each rank."""
    engine.source_digest = functools.cache(engine.source_digest)
    diagnose(PipelineConfig())


def _remember_entry_points() -> None:
    """Read the metadata of all installed packages once. Each rank would otherwise read it for
    torch's backends."""
    importlib.metadata.entry_points = functools.cache(  # type: ignore[assignment]
        importlib.metadata.entry_points
    )
    importlib.metadata.entry_points(group="torch.distributed.backends")


def _prepare_parsers() -> None:
    """Build the parsers of Megatron's command line, which each rank would otherwise build twice."""
    for _ in range(2):  # two parsers, each built as in Megatron's parse_args
        parser = argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False)
        _PARSERS.append(add_megatron_arguments(parser))


_PARSERS: list[argparse.ArgumentParser] = []


def take_prepared_parsers() -> None:
    """Let this rank use the parsers that the parent has prepared."""

    @functools.wraps(add_megatron_arguments)
    def prepared(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if not _PARSERS:
            return add_megatron_arguments(parser)
        made = _PARSERS.pop()
        made.prog = parser.prog
        return made

    arguments.add_megatron_arguments = prepared


def _print_unheard() -> None:
    """Stop wandb, which Megatron imports, from intercepting every write: printing a rank's
    arguments cost as much time as parsing them."""
    for stream in (sys.stdout, sys.stderr):
        vars(stream).pop("write", None)


def settle() -> None:
    """Let ranks that are forked later share the memory of everything that is imported by now,
    without copying it."""
    _ATTRIBUTES.remember()
    gc.freeze()
    use_huge_pages()


_ATTRIBUTES = _Attributes()
_remember_docstrings()
_prepare_parsers()
_ATTRIBUTES.remember()
_remember_sources()
_remember_entry_points()
_print_unheard()
random._share_storage_ext = SimpleNamespace(share_storage=_share_storage)
# number of mock documents; Megatron's 100,000 take seconds to shuffle
MockGPTLowLevelDataset.size = 1000
settle()
atexit.register(gc.unfreeze)


@dataclass
class Run:
    """Record of one rank of a training.

    ``losses`` and ``norms`` have a float for each iteration, bit for bit. ``state`` has a digest of
    each parameter and optimizer tensor, as `megatron-ext parity` records them: by a name of the
    tensor that does not depend on its rank. ``layers`` are the layers of each chunk. ``tables`` are
    digests of the weights of the embedding and the output layer on this rank, after setup and after
    each iteration. ``predictions`` are, for each iteration on ranks that have them, the losses of
    multi-token prediction and the number of its correct tokens. ``redone`` is the number of steps
    that post-validation undid. ``features`` are, under one of this project's schedules, the
    features whose code was seen to run (`witnesses`).
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[Piece, int] = field(default_factory=dict)
    layers: list[list[int]] = field(default_factory=list)
    tables: list[dict[str, int]] = field(default_factory=list)
    schedule: str = ""
    evaluation: list[float] = field(default_factory=list)
    predictions: list[list[float]] = field(default_factory=list)
    redone: int = 0
    features: frozenset[Feature] | None = None


# A model with experts; its test decides how many ranks share them.
EXPERTS: dict[str, object] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 1e-2,
    "moe_token_dispatcher_type": "alltoall",
    "disable_bias_linear": True,
}


def model_flags(**overrides: object) -> list[str]:
    """Return the flags of a GPT of 4 layers on mock data. An override of None removes a flag, True
    makes it a switch, and a tuple is several words."""
    flags: dict[str, object] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "lr": 1e-2,
        "train_iters": 5,
        "clip_grad": 0,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": 63,
        "num_workers": 0,
        "eval_iters": 0,
        "eval_interval": 1000,
        "log_interval": 1,
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "ckpt_format": "torch_dist",
        "use_cpu_initialization": True,
    }
    flags |= overrides
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words += map(str, value if isinstance(value, tuple) else (value,))
    return words


def train(
    ranks: int,
    flags: Sequence[str],
    script: Path = SCRIPT,
    model_config: Mapping[str, object] | None = None,
    model_provider: Callable[..., Any] | None = None,
    before: Sequence[str] = (),
) -> list[Run]:
    """Train on ``ranks`` ranks; fail unless every rank ends well and at least one iteration was
    run.

    ``model_config`` is set on the model's config, for settings without a flag. If there is a
    ``model_provider``, Megatron builds the model with it, as for scripts that pass one to
    pretrain(). ``before`` are words of ours between ``-m megatron_ext`` and the script.
    """
    runs = values(train_or_fail(ranks, flags, script, model_config, model_provider, before))
    assert any(run.losses for run in runs), "not one iteration was trained"
    return runs


def _note(runs: Sequence[Run]) -> None:
    """Tell the running test which features its trainings had."""
    for run in runs:
        if run.features is not None:
            witnesses.note(run.features)


def train_or_fail(
    ranks: int,
    flags: Sequence[str],
    script: Path = SCRIPT,
    model_config: Mapping[str, object] | None = None,
    model_provider: Callable[..., Any] | None = None,
    before: Sequence[str] = (),
) -> list[RankResult]:
    """Train like `train`, but return how each rank ended, also if it failed."""
    with agent_store() as port:
        results = run_ranks(
            ranks,
            lambda rank: _train_rank(
                rank,
                ranks,
                port,
                [*before, str(script), *witnesses.switched_off(list(flags))],
                model_config or {},
                model_provider,
            ),
            connect=False,
        )
    _note([result.value for result in results if result.value is not None])
    return results


def fork_checkpoint_manager() -> None:
    """In a rank that saves a checkpoint, fork the process to which the checkpoint's writers report.
    Megatron would spawn it, which takes seconds."""
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def losses(runs: Sequence[Run]) -> list[float]:
    """Return the losses, which the last pipeline rank has."""
    return next(run.losses for run in runs if run.losses)


def evaluations(runs: Sequence[Run]) -> list[float]:
    """Return the evaluation losses, which the last pipeline rank has."""
    return next((run.evaluation for run in runs if run.evaluation), [])


def predictions(runs: Sequence[Run]) -> list[list[float]]:
    """Return the losses and counts of multi-token prediction, which the last pipeline rank has."""
    return next((run.predictions for run in runs if run.predictions), [])


def whole_state(runs: Sequence[Run]) -> dict[str, int]:
    """Return the state of all ranks; fail if two ranks have different values of a tensor that
    should be equal."""
    whole: dict[str, dict[Place, int]] = {}
    for rank, run in enumerate(runs):
        for piece, share in run.state.items():
            name = readable_name((piece.name, piece.index))
            same = whole.setdefault(name, {}).setdefault(piece.place, share)
            assert same == share, f"rank {rank} has another {name}"
    return {name: sum(pieces.values()) % 2**64 for name, pieces in whole.items()}


def assert_same(runs: Sequence[Run], reference: Sequence[Run]) -> None:
    """Assert that both trainings ended with the same losses and tensors, to the last bit, wherever
    the tensors are.

    ``runs`` may have begun later than ``reference``, from a checkpoint.
    """
    _note(runs)
    ours = losses(runs)
    theirs = losses(reference)[-len(ours) :]
    assert ours == theirs, f"losses {ours}, expected {theirs}"
    if ours := evaluations(runs):
        theirs = evaluations(reference)[-len(ours) :]
        assert ours == theirs, f"evaluation losses {ours}, expected {theirs}"
    if made := predictions(runs):
        stocks = predictions(reference)[-len(made) :]
        assert made == stocks, f"multi-token prediction came to {made}, expected {stocks}"
    state, expected = whole_state(runs), whole_state(reference)
    assert state.keys() == expected.keys(), f"only one has {state.keys() ^ expected.keys()}"
    different = [name for name in expected if state[name] != expected[name]]
    assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:5]}"


def _train_rank(
    rank: int,
    ranks: int,
    port: int,
    words: Sequence[str],
    model_config: Mapping[str, object],
    model_provider: Callable[..., Any] | None,
) -> Run:
    # Nothing is compiled, or compiling would take half of a rank's time. The CPU platform's
    # TORCHDYNAMO_DISABLE does the same, but only if torch is imported after it is set.
    torch.compiler.set_stance("force_eager")
    os.environ |= torchrun_environment(rank, ranks, port)
    from megatron.training import training

    from megatron_ext.__main__ import main

    take_prepared_parsers()
    if "--save" in words:
        fork_checkpoint_manager()
    listener = _Listener(model_config, model_provider, witnesses.is_ours(words))
    listener.listen(training, "--pipeline-post-validation" in words)
    try:
        main(words)
    except SystemExit as end:  # --exit-interval
        if end.code:
            raise
    return listener.whole_run()


class _Listener:
    """Records results of Megatron's training loop by replacing some of its functions."""

    def __init__(
        self,
        model_config: Mapping[str, object],
        model_provider: Callable[..., Any] | None,
        is_ours: bool,
    ) -> None:
        self._features = witnesses.watch() if is_ours else None
        self._model_config = model_config
        self._model_provider = model_provider
        self._run = Run()
        # result of Megatron's setup: the model's chunks, the optimizer and its scheduler
        self._made: Any = ()

    def listen(self, training: Any, post_validates: bool) -> None:
        setup, log = training.setup_model_and_optimizer, training.training_log
        training.setup_model_and_optimizer = functools.partial(self._setup, setup)
        # The wrapper keeps the signature, as patches look at the function's parameters.
        training.training_log = functools.wraps(log)(functools.partial(self._log, log))
        training.evaluate = functools.partial(self._evaluate, training.evaluate)
        helper = training.MTPLossLoggingHelper
        helper.track_mtp_metrics = functools.partial(
            self._track_predictions, helper, helper.track_mtp_metrics
        )
        if post_validates:
            optimizer = importlib.import_module(
                "megatron_ext.features.post_validation.adapter.optimizer"
            )
            redo = optimizer.SpeculativeOptimizer.redo

            def record_redo(*args: Any) -> Any:
                self._run.redone += 1
                return redo(*args)

            optimizer.SpeculativeOptimizer.redo = record_redo

    def _setup(self, setup: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import get_model_config

        if self._model_provider is not None:
            kwargs["cfg_container"].model = None
            kwargs["model_provider_func"] = self._model_provider
        self._made = setup(*args, **kwargs)
        for name, value in self._model_config.items():
            setattr(get_model_config(self._made[0][0]), name, value)
        self._run.tables.append(_tables(self._made[0]))
        return self._made

    def _log(
        self, log: Callable[..., Any], loss_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if "lm loss" in loss_dict:
            self._run.losses.append(logged_loss(loss_dict["lm loss"]))
        self._run.norms.append(float(args[6]) if args[6] is not None else 0.0)
        self._run.tables.append(_tables(self._made[0]))
        return log(loss_dict, *args, **kwargs)

    def _evaluate(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0]:
            self._run.evaluation += [logged_loss(loss) for loss in result[0].values()]
        return result

    def _track_predictions(self, helper: Any, track: Callable[..., Any], *args: Any) -> None:
        noted = [
            figure
            # Megatron 0.18 has the first of these names in the tracker, later versions the others.
            for name in ("values", "loss_values", "correct_values")
            if name in helper.tracker
            for figure in helper.tracker[name].tolist()
        ]
        if noted:
            self._run.predictions.append(noted)
        track(*args)

    def whole_run(self) -> Run:
        """Return the record after the training, with its tensors and the name of the function that
        ran its steps."""
        models, optimizer = self._made[:2]
        tensors = NamedTensors(models, optimizer, get_args())
        self._run.state = digests(itertools.chain(tensors.parameters(), tensors.optimizer_states()))
        self._run.layers = [_layers(chunk) for chunk in models]
        if self._features is not None:
            self._run.features = frozenset(self._features)
        schedule = sys.modules["megatron.core.pipeline_parallel"].get_forward_backward_func()
        self._run.schedule = getattr(schedule, "__name__", type(schedule).__name__)
        return self._run


def _layers(chunk: torch.nn.Module) -> list[int]:
    """Return the numbers of the layers of a GPT's chunk, counted from 0 through the whole model."""
    try:
        model = get_attr_wrapped_model(chunk, "decoder", return_model_obj=True)
    except RuntimeError:  # the chunk has no decoder
        return []
    return [layer.layer_number - 1 for layer in model.decoder.layers]


def _tables(model: Sequence[torch.nn.Module]) -> dict[str, int]:
    """Return digests of the tables of the embedding and of the output layer that this rank has,
    both of them even if they are tied. Fail if the rank has two tables of one name and they differ.
    Multi-token prediction on a V placement has two such tables."""
    tables: dict[str, int] = {}
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            for table in ("embedding.word_embeddings.weight", "output_layer.weight"):
                if name.endswith(table):
                    made = _digest(parameter)
                    assert tables.setdefault(table, made) == made, f"two {table} differ"
    return tables


def _digest(tensor: torch.Tensor) -> int:
    shape = tuple(tensor.shape)
    whole = Piece("", (), shape, (0,) * len(shape), shape, 0, tensor.numel(), dtype_of(tensor))
    return int(digest(tensor, whole))
