"""The folder of NeMo-RL's public sources, which are on no package index."""

from tests.helpers.ranks import ROOT

CHECKOUT = ROOT / "build" / "NVIDIA-NeMo" / "RL"
