"""Folder of NeMo-RL's public sources, which no package index has."""

from tests.helpers.ranks import ROOT

CHECKOUT = ROOT / "build" / "NVIDIA-NeMo" / "RL"
