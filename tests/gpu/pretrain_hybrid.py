"""scripts/pretrain_gpt.py with a hybrid model of Megatron's own layers in place of the GPT."""

from __future__ import annotations

from megatron.training.argument_utils import hybrid_config_from_args

from scripts import pretrain_gpt

if __name__ == "__main__":
    pretrain_gpt.gpt_config_from_args = hybrid_config_from_args
    pretrain_gpt.main()
