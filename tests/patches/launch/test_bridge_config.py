"""Tests of the fields that `megatron_ext.bridge.use` sets, refuses and restores in a
Megatron-Bridge config.

The config is a stand-in; tests/pipeline/callers/test_bridge.py trains with real ones.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_ext import bridge
from megatron_ext.config import PipelineConfig
from megatron_ext.patches.engine import PatchError


class Model(SimpleNamespace):
    """Stand-in for Bridge's model provider: fields, and hooks that can be registered."""

    def register_pre_wrap_hook(self, hook: Any) -> None:
        self._pre_wrap_hooks = [*getattr(self, "_pre_wrap_hooks", []), hook]


def config(**model: Any) -> Any:
    fields: dict[str, Any] = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": True,
        "defer_embedding_wgrad_compute": False,
        "transformer_impl": "local",
        "_pre_wrap_hooks": [],
    }
    overlap = {
        "overlap_p2p_comm": None,
        "batch_p2p_comm": None,
        "defer_embedding_wgrad_compute": True,
        "delay_wgrad_compute": None,
    }
    return SimpleNamespace(
        model=Model(**fields | model),
        comm_overlap=SimpleNamespace(**overlap),
        checkpoint=SimpleNamespace(dist_ckpt_optim_fully_reshardable=False, save=None, load=None),
        dist=SimpleNamespace(use_megatron_fsdp=False),
    )


@pytest.fixture
def installed() -> Any:
    with mock.patch.object(bridge, "install") as install:
        yield install


def test_a_v_brings_its_stages_and_undo_restores_the_config(installed: mock.Mock) -> None:
    given = config(virtual_pipeline_model_parallel_size=4)
    before = copy.deepcopy(given)
    with bridge.use(given, schedule="v-auto", memory_limit="0.5x"):
        assert given.model.virtual_pipeline_model_parallel_size == 2
        for owner in (given.model, given.comm_overlap):
            assert owner.overlap_p2p_comm is True
            assert owner.batch_p2p_comm is False
            assert not owner.defer_embedding_wgrad_compute
        assert given.checkpoint.dist_ckpt_optim_fully_reshardable
        assert len(given.model._pre_wrap_hooks) == 1
        installed.return_value.undo.assert_not_called()
    installed.return_value.undo.assert_called_once_with()
    assert given == before


def test_one_stage_a_rank_takes_virtual_stages_away(installed: mock.Mock) -> None:
    given = config(virtual_pipeline_model_parallel_size=4)
    bridge.use(given, schedule="zb-h1")
    assert given.model.virtual_pipeline_model_parallel_size is None
    assert given.comm_overlap.overlap_p2p_comm is False
    assert given.model._pre_wrap_hooks == []
    assert not given.checkpoint.dist_ckpt_optim_fully_reshardable


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("model", "pipeline_model_parallel_size", 1), "pipeline_model_parallel_size is 1: set it"),
        (("dist", "use_megatron_fsdp", True), "use_megatron_fsdp=True"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_and_unchanged(
    installed: mock.Mock, change: tuple[str, str, Any], message: str
) -> None:
    given = config()
    part, name, value = change
    setattr(getattr(given, part), name, value)
    before = copy.deepcopy(given)
    with pytest.raises(ValueError, match=message):
        bridge.use(given, schedule="zb-v")
    installed.assert_not_called()
    assert given == before


def test_a_check_refuses_what_use_does_and_changes_nothing(installed: mock.Mock) -> None:
    """`bridge.check` refuses a config with the words of `bridge.use`, without changing the config.
    It also checks changes that a plan proposes."""
    given = config(pipeline_model_parallel_layout="Et|tL")
    before = copy.deepcopy(given)
    zb_v, zb_h1 = (PipelineConfig.parse(schedule=name) for name in ("zb-v", "zb-h1"))
    bridge.check(given, zb_h1)
    with pytest.raises(ValueError, match="puts 2 stages on each rank") as refused:
        bridge.use(given, schedule="zb-v")
    with pytest.raises(ValueError) as checked:
        bridge.check(given, zb_v)
    assert str(checked.value) == str(refused.value)
    bridge.check(given, zb_v, {"model.pipeline_model_parallel_layout": "E|t|t|L"})
    with pytest.raises(ValueError, match="use_megatron_fsdp=True"):
        bridge.check(given, zb_h1, {"dist.use_megatron_fsdp": True})
    assert given == before
    installed.assert_not_called()


def test_a_patch_that_does_not_fit_leaves_the_config_unchanged(installed: mock.Mock) -> None:
    installed.side_effect = RuntimeError("no patch was applied")
    given = config()
    before = copy.deepcopy(given)
    with pytest.raises(RuntimeError, match="no patch"):
        bridge.use(given, schedule="zb-v")
    assert given == before


def test_a_second_call_doubles_nothing_and_undo_restores_the_config(installed: mock.Mock) -> None:
    """A second call of `bridge.use` with the same settings changes nothing, and undoing its handle
    restores the config. The second call used to register the hook twice, and undoing its handle
    removed the schedule while the config still had that schedule's stages."""
    given = config()
    before = copy.deepcopy(given)
    handle = bridge.use(given, schedule="zb-v")
    placed = copy.deepcopy(given)
    assert bridge.use(given, schedule="zb-v") is handle
    assert given == placed
    # The caller changes the config after `use`.
    given.model.virtual_pipeline_model_parallel_size = None
    bridge.use(given, schedule="zb-v")
    assert given == placed
    handle.undo()
    assert given == before
    installed.return_value.undo.assert_called_once_with()
    assert bridge.use(given, schedule="zb-v") is handle
    assert given == placed
    handle.undo()
    assert given == before
    assert installed.return_value.undo.call_count == 2


def test_a_second_call_with_other_settings_is_refused_and_changes_nothing() -> None:
    """A second call of `bridge.use` with another schedule is refused and changes nothing. The
    patches of the first schedule are applied, so a training would run under the first one."""
    given = config()
    with bridge.use(given, schedule="zb-v"):
        placed = copy.deepcopy(given)
        with pytest.raises(PatchError, match="zb-v is already installed in this process"):
            bridge.use(given, schedule="zb-h1")
        with pytest.raises(ValueError, match="use_megatron_fsdp=True"):
            given.dist.use_megatron_fsdp = placed.dist.use_megatron_fsdp = True
            bridge.use(given, schedule="zb-v")
        assert given == placed
