"""Multi-latent attention on the CPU, whose core attention is otherwise Transformer Engine's."""

from __future__ import annotations

from typing import Any

from megatron.core.models import backends
from megatron.core.transformer.dot_product_attention import DotProductAttention


class Attention(DotProductAttention):
    """Megatron's own core attention, with the arguments that multi-latent attention passes to
    Transformer Engine's."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **more: Any
    ) -> None:
        super().__init__(*args, **more)


def take_local_attention() -> None:
    """Let layers that are built in this process use `Attention`."""
    backends.DotProductAttention = Attention
