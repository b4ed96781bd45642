"""Layouts of a launch line: Megatron takes what is written for them."""

from __future__ import annotations

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ext.schedule.plan.layouts.layout import Layout


@pytest.mark.parametrize(
    ("layers", "ranks", "depths"),
    [
        ((5, 6, 6, 6, 6, 6, 6, 3), 8, 1),
        ((1, *[2] * 14, 1), 4, 0),
        ((4, 5, 5, 5, 5, 5, 5, 0), 4, 2),
        ((12, 11, 10, 3), 4, 0),
    ],
)
def test_megatron_reads_what_is_printed(layers: tuple[int, ...], ranks: int, depths: int) -> None:
    layout = Layout(layers)
    read = PipelineParallelLayerLayout.from_str(layout.text(depths), ranks)
    read.validate_layer_layout(sum(layers), depths)
    counts = [
        read.layout[stage % ranks][stage // ranks].count(LayerType.decoder)
        for stage in range(len(layers))
    ]
    assert counts == list(layers)
    assert read.layout[-1][-1].count(LayerType.mtp) == depths
