"""Multi-latent attention on the CPU, whose core is Transformer Engine's elsewhere."""

from __future__ import annotations

from typing import Any

from megatron.core.models import backends
from megatron.core.transformer.dot_product_attention import DotProductAttention


class Attention(DotProductAttention):
    """Megatron's own, as multi-latent attention calls Transformer Engine's."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)


def take_local_attention() -> None:
    """In this process, layers are made with it."""
    backends.DotProductAttention = Attention
