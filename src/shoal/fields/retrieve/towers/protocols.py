"""What ways to train towers promise, and the values that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeAlias, runtime_checkable

from annotated_types import Ge, Gt, Le
from pydantic import NonNegativeInt, PositiveInt

from shoal.core.config import Value
from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.fields.retrieve.towers.pair import TowerPair
    from shoal.fields.retrieve.towers.rates import TowerRates
    from shoal.ir.comm import Comm

Tick: TypeAlias = Callable[[float, str], None]
"""Called with the share that is done, and what is being done."""

Pooling: TypeAlias = Literal["mean", "last", "layers"]
Precision: TypeAlias = Literal["bf16", "fp32"]


class TowerError(ConfigError, ValueError):
    """Towers, or texts for them, that cannot be used."""


@dataclass(frozen=True)
class TextPairs:
    """Queries, the document that answers each, and queries of which no document is known.

    Args:
        queries: N texts.
        documents: N texts, document i for query i.
        unlabelled: further queries, for distillation.
    """

    queries: Sequence[str]
    documents: Sequence[str]
    unlabelled: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.queries)


class TowerTask(Value):
    """How towers are trained; the key names of a job ``train_towers``.

    Args:
        large: backbone of the large towers: ``S``, ``M``, ``L``, LAYERSxWIDTH, or a Hugging Face
            directory of a decoder.
        small: backbone of the small towers.
        vocab: entries of the tokenizer that is learned; a directory brings its own.
        query_length: most tokens of a query, its prompt included.
        document_length: most tokens of a document.
        query_prompt: stands before each query.
        document_prompt: stands before each document.
        pooling: a text's vector comes from the mean of its tokens' states, from the state of the
            last, or from the means behind the embedding and every layer, side by side.
        dim: numbers of a vector; 0 for the width of the backbone.
        shared: both towers have the same weights, and differ in prompt and length.
        epochs: passes over the pairs.
        batch: pairs of a step, of all ranks together.
        lr: peak learning rate of AdamW at width 128; wider towers have less in proportion.
        temperature: by which cosines are divided.
        hard_share: mined negatives of a step, as a share of its pairs; 0 mines none.
        hard_margin: documents whose cosine is within this of the right one's, or above, are taken
            for answers, and are no negatives.
        precision: of the products of a training step; vectors of single queries are fp32.
        seed: of weights, order and negatives.
    """

    large: str = "L"
    small: str = "S"
    vocab: Annotated[int, Ge(300), Le(262_144)] = 8192
    query_length: Annotated[int, Ge(2), Le(8192)] = 16
    document_length: Annotated[int, Ge(2), Le(8192)] = 32
    query_prompt: str = "title: "
    document_prompt: str = "body: "
    pooling: Pooling = "mean"
    dim: Annotated[int, Ge(0), Le(65_536)] = 0
    shared: bool = True
    epochs: PositiveInt = 2
    batch: PositiveInt = 128
    lr: Annotated[float, Gt(0)] = 2e-3
    temperature: Annotated[float, Gt(0), Le(1)] = 0.05
    hard_share: Annotated[float, Ge(0), Le(4)] = 0.25
    hard_margin: Annotated[float, Ge(0), Le(2)] = 0.05
    precision: Precision = "bf16"
    seed: NonNegativeInt = 0


class TowerCost(Value):
    """What training costs, and what comes of it.

    Args:
        train_s: seconds on one rank.
        parameters: that are in memory at once, of models that learn; without embeddings' rows.
        memory_bytes: beside the interpreter.
        query_s: seconds to encode one query.
    """

    train_s: float
    parameters: int
    memory_bytes: float
    query_s: float


@runtime_checkable
class TowerTraining(Protocol):
    """A way to train a pair of towers: a part of kind ``tower_training``."""

    def estimate(
        self, task: TowerTask, pairs: int, unlabelled: int, rates: TowerRates
    ) -> TowerCost:
        """What it costs on this machine; allocates nothing.

        Args:
            task: how.
            pairs: of queries and documents.
            unlabelled: further queries.
            rates: of the machine.
        """

    def train(
        self, task: TowerTask, pairs: TextPairs, tick: Tick, comm: Comm | None = None
    ) -> TowerPair:
        """Train on pairs; every rank of ``comm`` calls it with the same arguments.

        Raises:
            TowerError: a batch of one pair, towers of unequal dimension, other tokenizers.
        """
