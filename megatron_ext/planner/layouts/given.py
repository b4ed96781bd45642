"""Work of equal layers whose costs are given, for any layout.

If a user gives costs in place of a model, single layers are known only if all are equal: each then
has its share of the layers' costs, and embedding, output layer and encoder stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.model_memory import ModelBytes
from megatron_ext.planner.layouts.work import Work
from megatron_ext.schedule.costs import Costs, LinkCosts, VocabularyCosts
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel

_NO_BYTES = ModelBytes(0.0, 0.0, 0.0)


def given_work(
    costs: Costs,
    layers: int,
    *,
    ranks: int,
    microbatches: int,
) -> Work:
    """Return the training of equal ``layers`` whose costs are given, for any layout.

    Together the layers cost as much as all stages of ``costs`` without embedding, output layer and
    encoder. Bytes of the model are not known.

    Args:
        costs: costs on ranks that are all alike.
    """
    alone = costs.layers_alone
    ends = costs.vocabulary or VocabularyCosts()

    def costs_of(stages: Sequence[Stage], placement: Placement, slices: int) -> Costs:
        passes = alone.passes.spread(layers, [len(stage.layers) for stage in stages])
        links = alone.links
        links = LinkCosts(links.p2p_seconds, links.latency, message_bytes=links.message_bytes)
        of_slices = alone.slices.spread(layers, [len(stage.layers) for stage in stages], alone)
        made = Costs(passes, links, of_slices, origin=costs.origin).with_vocabulary(ends)
        return made if costs.tower is None else made.with_tower(costs.tower)

    def bytes_of(
        stages: Sequence[Stage], placement: Placement, vocabulary: VocabularyParallel
    ) -> list[ModelBytes]:
        return [_NO_BYTES] * placement.ranks

    return Work(
        _model(layers),
        ranks,
        microbatches,
        costs_of,
        bytes_of,
        seconds_outside_passes=lambda model: 0.0,
    )


def _model(layers: int) -> Model:
    """Return a model of which only the number of layers is known, for given costs."""
    return Model(
        layers=("*-",) * layers,
        hidden_size=0,
        num_attention_heads=0,
        num_query_groups=0,
        kv_channels=0,
        ffn_hidden_size=0,
        vocabulary=0,
    )
