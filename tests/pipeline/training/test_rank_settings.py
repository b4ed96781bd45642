"""Tests of arguments that differ between ranks: those that decide numbers or programs end the job,
others do not.

A node with another ``--seed`` or ``--lr`` used to train another model without an error: all ranks
ended with exit status 0.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from megatron import core
from megatron.core import parallel_state
from megatron.training.arguments import add_megatron_arguments

from megatron_ext.adapter.rank_settings.argument_facts import (
    RankSetting,
    argument_facts,
    known_settings,
    model_facts,
)
from megatron_ext.adapter.rank_settings.launch_facts import refuse_other_models
from megatron_ext.runtime.store.agreement import RankFacts, deciding_differences, other_differences
from tests.helpers.callers import small_config
from tests.helpers.megatron_runs import SCRIPT, _train_rank, losses, model_flags
from tests.helpers.ranks import RankResult, agent_store, run_ranks, values
from tests.helpers.trainings import Training
from tests.pipeline.callers.test_callers import installed, step

Flags = dict[str, object]
PAIR: Flags = {"pipeline_model_parallel_size": 2, "train_iters": 2, "global_batch_size": 4}

# Arguments that decide numbers or the program, by subject.
DECIDES = {
    "parallel sizes": "tensor_model_parallel_size pipeline_model_parallel_size "
    "context_parallel_size expert_model_parallel_size "
    "num_virtual_stages_per_pipeline_rank sequence_parallel",
    "model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_experts swiglu "
    "normalization untie_embeddings_and_output_weights hidden_dropout attention_dropout "
    "init_method_std moe_aux_loss_coeff moe_router_topk padded_vocab_size rotary_base",
    "batch": "micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule",
    "lengths": "seq_length max_position_embeddings",
    "seed": "seed data_parallel_random_init",
    "precision": "bf16 fp16 fp8 fp8_recipe loss_scale grad_reduce_in_bf16 main_grads_dtype",
    "optimizer": "optimizer lr min_lr weight_decay clip_grad adam_beta1 adam_eps lr_decay_style "
    "lr_warmup_iters use_distributed_optimizer overlap_grad_reduce",
    "iterations": "train_iters train_samples eval_iters eval_interval save_interval exit_interval",
    "data": "split mock_data dataloader_type reset_position_ids eod_mask_loss tokenizer_type",
    "recompute": "recompute_granularity recompute_method recompute_num_layers recompute_modules",
    # Ranks with another interval would hang in a collective of Megatron's logging.
    "log": "log_interval log_params_norm",
}


def parser_names() -> set[str]:
    parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    return {action.dest for action in parser._actions}


@pytest.mark.skipif(
    not core.__version__.startswith("0.19"), reason="the numbers are of Megatron 0.19's arguments"
)
def test_each_argument_of_megatron_has_a_class() -> None:
    names, known = parser_names(), known_settings()
    assert not names - known.keys()
    assert known.keys() - names == {"rank"}  # the launcher's variable sets the rank
    assert Counter(known[name] for name in names) == {
        RankSetting.DECIDES: 609,
        RankSetting.PATH: 30,
        RankSetting.MAY_DIFFER: 167,
    }


@pytest.mark.parametrize("subject", DECIDES)
def test_what_decides_numbers_or_program_is_compared(subject: str) -> None:
    for name in DECIDES[subject].split():
        assert known_settings()[name] is RankSetting.DECIDES, name


def told(*arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return the error and the remark about ranks with these ``arguments``, one mapping for each
    rank."""
    ranks = [RankFacts(f"node{n}", argument_facts(given)) for n, given in enumerate(arguments)]
    return deciding_differences(ranks), other_differences(ranks)


def test_both_values_are_named() -> None:
    mistake, _ = told({"lr": 1e-4, "seed": 1}, {"lr": 2e-4, "seed": 1}, {"lr": 1e-4, "seed": 1})
    assert "--lr: 0.0001 on global ranks 0, 2 (node0, node2); 0.0002 on global rank 1" in mistake
    assert "--seed" not in mistake


@pytest.mark.parametrize(
    ("one", "other", "is_mistake"),
    [
        ({"load": "/a"}, {"load": "/b"}, False),
        ({"load": "/a"}, {"load": None}, True),
        (
            {"data_path": ["0.3", "/a", "0.7", "/b"]},
            {"data_path": ["0.3", "/c", "0.7", "/d"]},
            False,
        ),
        (
            {"data_path": ["0.3", "/a", "0.7", "/b"]},
            {"data_path": ["0.4", "/a", "0.6", "/b"]},
            True,
        ),
        ({"data_path": ["/a", "/b"]}, {"data_path": ["/a"]}, True),
        ({"tensorboard_dir": "/a", "num_workers": 2}, {"tensorboard_dir": None}, False),
        ({"fp8": None}, {"fp8": "hybrid"}, True),
        ({"recompute_modules": ["mlp"]}, {"recompute_modules": ["mlp", "moe"]}, True),
        ({"pipeline_trace": "/a"}, {"pipeline_trace": "/b"}, False),
        ({"add_bias_linear": True}, {"add_bias_linear": False}, True),
    ],
)
def test_paths_may_differ_and_weights_not(one: Flags, other: Flags, is_mistake: bool) -> None:
    mistake, remarked = told(one, other)
    assert bool(mistake) is is_mistake and not remarked


def test_an_argument_of_a_script_is_a_remark() -> None:
    mistake, remarked = told({"my_rate": 1, "hub_token": "a"}, {"my_rate": 2, "hub_token": "b"})
    assert not mistake and "token" not in remarked
    assert "--my-rate: 1 on global rank 0 (node0); 2 on global rank 1 (node1)" in remarked
    assert told({"made": object(), "rate": 1}, {"made": object(), "rate": 1}) == ("", "")


def test_many_differences_are_a_short_message() -> None:
    many = [{f"argument_{n}": rank for n in range(50)} for rank in range(20)]
    remarked = told(*many)[1]
    assert "and 34 more" in remarked and "and 12 more values" in remarked
    long = told({"lr_decay_style": "a" * 500 + "b"}, {"lr_decay_style": "a" * 500 + "c"})[0]
    assert "aaa... on global rank 0" in long and len(long) < 800


def launch(*flags: Flags) -> list[RankResult]:
    """Train with one rank for each entry of ``flags``, which are that rank's flags."""

    def launched(rank: int, port: int) -> Any:
        words = [str(SCRIPT), *model_flags(**flags[rank])]
        return _train_rank(rank, len(flags), port, words, {}, None)

    with agent_store() as port:
        return run_ranks(len(flags), lambda rank: launched(rank, port), connect=False)


def test_another_seed_and_learning_rate_on_one_rank_end_the_job() -> None:
    given: Flags = {**PAIR, "pipeline_schedule": "zb-h1", "seed": 1}
    for result in launch(given, {**given, "seed": 2, "lr": 2e-2}):
        assert result.exit_code == 1
        assert "--seed: 1 on global rank 0 (" in result.error
        assert "; 2 on global rank 1 (" in result.error
        assert "--lr: 0.01 on global rank 0 (" in result.error


def test_paths_logging_and_workers_of_a_node_are_its_own(tmp_path: Path) -> None:
    """A training accepts ranks whose folders, logging, numbers of workers and timeouts differ, as
    nodes may have their own."""
    given: Flags = {**PAIR, "pipeline_schedule": "zb-h1"}
    own: list[Flags] = [
        {"tensorboard_dir": tmp_path, "log_throughput": True, "data_cache_path": tmp_path / "a"},
        {"num_dataset_builder_threads": 2, "distributed_timeout_minutes": 9, "manual_gc": True},
    ]
    results = launch(*(given | more for more in own))
    assert not any("ranks differ" in result.stderr for result in results)
    expected = losses(Training(2, PAIR).run())
    assert losses(values(results)) == expected and len(expected) == 2


def test_configs_of_a_caller_are_compared() -> None:
    """A caller without Megatron's arguments has only the model's TransformerConfig, so ranks
    compare that config. Here the dropout differs."""

    def on_rank(rank: int) -> str:
        with installed(2, schedule="zb-h1"):
            assert parallel_state.get_pipeline_model_parallel_rank() == rank
            dropout = 0.1 if rank else 0.0
            with pytest.MonkeyPatch.context() as patched:
                config = small_config(4, 2, hidden_dropout=dropout)
                patched.setattr(
                    "tests.pipeline.callers.test_callers.small_config", lambda *_: config
                )
                with pytest.raises(ValueError, match="hidden_dropout") as error:
                    step(own_groups=False)
        return str(error.value)

    for text in values(run_ranks(2, on_rank)):
        assert "TransformerConfig of GPTModel, hidden_dropout: 0.0 on global rank 0 (" in text
        assert "; 0.1 on global rank 1 (" in text


def test_a_wrapper_does_not_make_two_models_one() -> None:
    """Ranks with different models compare no config, even if both models are in the same wrapper.
    An encoder on some ranks and a language model on others, both within DistributedDataParallel,
    used to be refused for their different sizes."""

    class Wrapper:
        def __init__(self, module: Any) -> None:
            self.module = module

    class Encoder:
        pass

    def on_rank(rank: int) -> None:
        config = small_config(2, 1, hidden_size=16 * (rank + 1))
        refuse_other_models(config, Wrapper(Wrapper(Encoder() if rank else object())))
        with pytest.raises(ValueError, match="hidden_size"):
            refuse_other_models(config, Wrapper(object()))

    values(run_ranks(2, on_rank))


def test_functions_of_a_config_and_other_models_are_not_compared() -> None:
    def facts(model: Any, **settings: Any) -> RankFacts:
        return RankFacts("a", model_facts(small_config(2, 1, **settings), model))

    class Encoder:
        """Model of the ranks in front of the language model's ranks."""

    one = facts(object(), no_sync_func=[lambda: None], timers=object())
    assert not deciding_differences([one, facts(object())]) and not other_differences(
        [one, facts(object())]
    )
    assert deciding_differences([one, facts(object(), layernorm_epsilon=1e-6)])
    assert not deciding_differences([one, facts(Encoder(), hidden_size=32)])
