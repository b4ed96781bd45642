"""Schedules in Megatron-Bridge, by two lines before ``pretrain``.

    config = vanilla_gpt_pretrain_config()
    megatron_ext.bridge.use(config, schedule="v-auto", memory_limit="0.5x")
    pretrain(config, forward_step)

Bridge itself is not imported here: a config is known by the names of its parts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from megatron_ext.base.logger import logger
from megatron_ext.base.words import counted
from megatron_ext.config import PipelineConfig
from megatron_ext.launch.installation import install
from megatron_ext.patches.engine import Handle

_CHUNKS = "virtual_pipeline_model_parallel_size"
_PARTS = (
    *("ddp", "optimizer", "dist", "checkpoint", "train", "validation", "logger", "rng"),
    "dataset",
)


class BridgeHandle(AbstractContextManager["BridgeHandle"]):
    """Handle of `use`. `undo` (or leaving the ``with`` block) restores Megatron and the config."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Undo everything, last change first. A second call does nothing."""
        self._undo_to(0)

    def _undo_to(self, changes: int) -> None:
        """Undo the latest changes until only ``changes`` of them are left."""
        while len(self._undo) > changes:
            self._undo.pop()()

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._keep(owner, name)
        setattr(owner, name, value)

    def _keep(self, owner: Any, name: str) -> None:
        """Have `undo` restore the value that ``owner`` has now."""
        if hasattr(owner, name):
            before = getattr(owner, name)
            self._undo.append(lambda: setattr(owner, name, before))


_latest: tuple[Any, PipelineConfig, BridgeHandle] | None = None


def use(config: Any, schedule: str, **settings: str | bool | None) -> BridgeHandle:
    """Make Bridge train ``config`` under ``schedule``, in this process.

    Call it after the last change of ``config`` and before ``pretrain`` or ``finetune``. It sets the
    virtual stages, switches off what the schedule does itself, in ``config.model`` and in
    ``config.comm_overlap``, which Bridge applies later, and installs the schedule. If the stages
    are not on the ranks in turn, as on a V, optimizer states are saved for any placement. A layout
    in ``config.model`` stays and must have as many stages as the schedule.

    A second call with the same settings applies them to what ``config`` has become since, and
    returns the first call's handle. A second call with other settings is refused until the first is
    undone.

    Args:
        config: Bridge's ConfigContainer, as its recipes return it.
        settings: those of `megatron_ext.install`.

    Returns:
        A handle: ``handle.undo()``, or leaving ``with use(...):``, restores ``config`` and stock
        Megatron.

    Raises:
        TypeError: there is no such setting.
        ValueError: a setting is not understood, or ``config`` sets something that does not work
            with the schedule. Nothing is changed.
        PatchError: as `megatron_ext.install`. Nothing is changed.
    """
    global _latest
    ours = PipelineConfig.parse(schedule=schedule, **settings)
    handle = BridgeHandle()
    if _latest is not None and _latest[0] is config and _latest[1] == ours:
        handle = _latest[2]
    before = len(handle._undo)
    try:
        _prepare(handle, config, ours)
        if ours.arranges_microbatches:
            from megatron_ext.patches.megatron.bridge.data.loaders import import_loaders

            import_loaders()
        installed: Handle = install(ours)
        if installed.undo not in handle._undo:
            handle._undo.append(installed.undo)
    except BaseException:
        handle._undo_to(before)
        raise
    _latest = config, ours, handle
    return handle


def check(config: Any, settings: PipelineConfig, changes: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError if `use` would refuse ``config`` with these ``settings``, which have a
    schedule. Nothing is changed, and nothing logged.

    Args:
        changes: values of fields of ``config`` by their names, as ``model.num_layers``, with which
            it is to be checked.
    """
    handle, was_disabled = BridgeHandle(), logger.disabled
    logger.disabled = True
    try:
        for path, value in (changes or {}).items():
            *parts, name = path.split(".")
            handle._set(functools.reduce(getattr, parts, config), name, value)
        _prepare(handle, config, settings)
    finally:
        handle.undo()
        logger.disabled = was_disabled


def _prepare(handle: BridgeHandle, config: Any, ours: PipelineConfig) -> None:
    """Change ``config`` for the schedule. Raise ValueError if the two do not work together."""
    model = getattr(config.model, "transformer", config.model)
    ranks = model.pipeline_model_parallel_size
    if ranks < 2:
        raise ValueError(
            f"schedule={ours.schedule!r} needs a pipeline, but model.pipeline_model_parallel_size "
            f"is {ranks}: set it to 2 or more, or do not call megatron_ext.bridge.use"
        )
    _place(handle, config, model, ours)
    _switch_off(handle, config, model, ours)
    _refuse(config, model, ours)
    if ours.arranges_microbatches:
        _refuse_arrangement(config, model, ours)


def _place(handle: BridgeHandle, config: Any, model: Any, ours: PipelineConfig) -> None:
    """Set the schedule's virtual stages, what Bridge derives from them, and a format of optimizer
    states that any placement can load."""
    from megatron_ext.adapter.layout_arguments import LAYOUT_FIELDS

    placement = ours.resolved_spec.place(model.pipeline_model_parallel_size)
    chunks = placement.chunks
    for name in LAYOUT_FIELDS:
        handle._keep(model, name)
    if model.pipeline_model_parallel_layout is None:
        given = getattr(model, _CHUNKS)
        if given not in (None, chunks) and os.environ.get("RANK", "0") == "0":
            logger.info(
                f"model.{_CHUNKS} was {given}; {ours.resolved_spec.spec} has "
                f"{counted(chunks, 'virtual stage')} a rank"
            )
        handle._set(model, _CHUNKS, chunks if chunks > 1 else None)
    else:
        handle._keep(model, _CHUNKS)
    # The setting is also written to config.comm_overlap, which Megatron-Bridge later applies to the
    # model.
    for owner in (model, config.comm_overlap):
        if owner is not None:
            handle._set(owner, "overlap_p2p_comm", chunks > 1)
            handle._set(owner, "batch_p2p_comm", chunks == 1)
    if not placement.in_turn:
        handle._set(config.checkpoint, "dist_ckpt_optim_fully_reshardable", True)
    if ours.resolved_spec.moves_first_stage and hasattr(config.model, "register_pre_wrap_hook"):
        hooks = list(getattr(config.model, "_pre_wrap_hooks", []))
        if _copy_tied_weight not in hooks:
            handle._undo.append(lambda: setattr(config.model, "_pre_wrap_hooks", hooks))
            config.model.register_pre_wrap_hook(_copy_tied_weight)


def _copy_tied_weight(model: list[Any]) -> list[Any]:
    """Copy the first stage's embedding to its tied copies, and return ``model``.

    Bridge builds the chunks itself, and relies on an embedding group to make the copies equal.
    """
    from megatron_ext.adapter.tied import equalize_copies

    equalize_copies(model)
    return model


def _switch_off(handle: BridgeHandle, config: Any, model: Any, ours: PipelineConfig) -> None:
    from megatron_ext.adapter.handled_settings.settings import (
        HANDLED_SETTINGS,
        apply_handled_settings,
    )

    for owner in (config.comm_overlap, model):
        if owner is not None:
            for entry in HANDLED_SETTINGS:
                handle._keep(owner, entry.setting)
            apply_handled_settings(owner, ours)


def _refuse(config: Any, model: Any, ours: PipelineConfig) -> None:
    """Raise ValueError for a setting of ``config`` that does not work with the schedule."""
    from megatron_ext.adapter.compatibility import refuse
    from megatron_ext.adapter.layers import stages_of_layout

    ranks, layout = model.pipeline_model_parallel_size, model.pipeline_model_parallel_layout
    given = getattr(model, _CHUNKS) if layout is None else stages_of_layout(layout) // ranks
    for resolved in ours.resolved_specs:
        chunks = given or resolved.place(ranks).chunks
        refuse(_Settings(config, model, chunks), resolved, ours.options)


def _refuse_arrangement(config: Any, model: Any, ours: PipelineConfig) -> None:
    """Raise ValueError if the microbatches of ``config`` cannot be ordered or dealt."""
    from megatron_ext.adapter.arguments import check_microbatches

    dataset = config.dataset
    kind = dataset.dataloader_type
    is_packed = kind == "batch" and getattr(dataset, "enable_offline_packing", False)
    if kind == "batch" and not is_packed:
        raise ValueError(
            "microbatch_order, deal_microbatches: without offline packing Megatron-Bridge pads "
            "the samples of a step to one length, so all microbatches cost the same; set "
            "dataset.enable_offline_packing, or drop these settings"
        )
    args = SimpleNamespace(
        dataloader_type="single" if is_packed else kind,
        dataloader_inter_document_masking=(
            is_packed or getattr(dataset, "inter_document_masking", False)
        ),
        num_experts=model.num_moe_experts,
        moe_router_load_balancing_type=model.moe_router_load_balancing_type,
        data_parallel_size=getattr(config, "data_parallel_size", None),
    )
    check_microbatches(args, ours)


class _Settings:
    """The settings of a whole config by Megatron's names, as Bridge will apply them."""

    def __init__(self, config: Any, model: Any, chunks: int) -> None:
        self._parts = [model, *(getattr(config, name, None) for name in _PARTS)]
        self._overlap = config.comm_overlap
        self._chunks = chunks

    def __getattr__(self, name: str) -> Any:
        if (value := getattr(self._overlap, name, None)) is not None:
            return value
        if name == _CHUNKS:
            return self._chunks
        for part in self._parts:
            if part is not None and hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(name)
