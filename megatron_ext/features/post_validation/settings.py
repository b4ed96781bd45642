"""Setting ``--pipeline-post-validation``, which is the option ``steps_overlap`` of a schedule."""

from __future__ import annotations

from megatron_ext.base.setting import FeatureSettings, switch

POST_VALIDATION_SETTINGS = FeatureSettings(
    {
        "post_validation": {"option": "steps_overlap"}
        | switch(
            help="Experimental: overlap consecutive steps. The optimizer updates parameters before "
            "the global gradient norm is known, and checks the norm during the next step's "
            "warm-up. An update that should have been clipped or skipped is then undone and "
            "repeated exactly."
        )
    }
)
