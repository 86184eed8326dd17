"""The way ``end_to_end``: a small pair learns from the pairs directly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.parts import part
from shoal.cost.arithmetic import parameters
from shoal.fields.retrieve.towers.protocols import TextPairs, Tick, TowerCost, TowerTask
from shoal.fields.retrieve.towers.rates import TowerRates
from shoal.fields.retrieve.towers.shapes import config_of

if TYPE_CHECKING:
    from shoal.fields.retrieve.towers.pair import TowerPair
    from shoal.ir.comm import Comm


@part
class EndToEnd:
    """Train both small towers with InfoNCE over negatives of the batch, of all ranks and mined.

    Source: Karpukhin et al., Dense Passage Retrieval for Open-Domain Question Answering, 2020.
    """

    def estimate(
        self, task: TowerTask, pairs: int, unlabelled: int, rates: TowerRates
    ) -> TowerCost:
        """Two small towers."""
        return pair_cost(task, task.small, pairs, rates)

    def train(
        self, task: TowerTask, pairs: TextPairs, tick: Tick, comm: Comm | None = None
    ) -> TowerPair:
        """InfoNCE."""
        from shoal.fields.retrieve.towers.contrastive import train_pair

        return train_pair(task, task.small, pairs, tick, comm)


def pair_cost(task: TowerTask, backbone: str, pairs: int, rates: TowerRates) -> TowerCost:
    """What stage 1 costs.

    Args:
        task: how.
        backbone: of both towers.
        pairs: that are learned from.
        rates: of the machine.
    """
    config = config_of(task, backbone)
    # Mined negatives come from the second pass on, and before each all texts are encoded.
    mines = (task.epochs - 1) if task.hard_share else 0
    documents = task.epochs + mines * task.hard_share
    learned = pairs * (task.epochs * task.query_length + documents * task.document_length)
    looked = mines * pairs * (task.query_length + task.document_length)
    batch = min(task.batch, pairs)
    # Each has two towers.
    steps = 2.0 * task.epochs * (pairs // batch)
    states = batch * (task.query_length + (1 + task.hard_share) * task.document_length)
    count = (1 if task.shared else 2) * parameters(config.shape())
    # Weights, gradients and two moments; about twenty numbers of each token and layer are kept.
    memory = 16.0 * count + 4 * states * config.num_layers * (
        8 * config.hidden + 4 * config.ffn_hidden
    )
    return TowerCost(
        train_s=rates.trained_s(config, learned, steps) + rates.seen_s(config, looked),
        parameters=count,
        memory_bytes=memory + 4.0 * pairs * config.hidden * 2,
        query_s=rates.encode_s(config, task.query_length),
    )
