"""Importing this module installs the schedule that the environment names.

For programs that can be told to import a module, but not to call a function: verl with
``VERL_USE_EXTERNAL_MODULES=megatron_ext.auto``. ``MEGATRON_EXT_SCHEDULE=zb-h1`` chooses the
schedule; the other settings have variables too, a flag ``--pipeline-x`` is ``MEGATRON_EXT_X``.
Without a schedule ``MEGATRON_EXT_TRACE=DIR`` traces Megatron's own.

Raises ValueError for a setting that is missing, unknown or not understood, and PatchError as
`megatron_ext.install` does. Nothing is installed then.
"""

from __future__ import annotations

import os

from megatron_ext.base.logger import logger
from megatron_ext.launch.installation import install
from megatron_ext.written_settings import from_environment

_config = from_environment(os.environ)
handle = install(_config)

if os.environ.get("RANK", "0") == "0":
    if _config.schedule is None:
        logger.info(f"Megatron's own schedule runs, and {_config.effect_on_stock}")
    else:
        logger.info(f"schedule {_config.schedule} is installed")
