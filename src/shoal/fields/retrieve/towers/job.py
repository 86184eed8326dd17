"""The values of a job ``train_towers``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.retrieve.towers.protocols import Pooling, Precision, TowerTask
from shoal.ir import Job, Plan, Report


class TrainTowersJob(Job):
    """Train a tower for queries and one for documents, and measure what they retrieve.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: ``local:N``, N pairs of this machine's documentation and packages; a file of JSON
            lines with ``query`` and ``document`` (rows without a document are further queries); or
            documents with titles, as ``rank_peers`` reads them (``packages``,
            ``docstrings:PACKAGE``, a directory).
        method: the way to train; None lets the planner choose.
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
        held: pairs that are held out to judge by, and as many more to choose by.
        k: documents of an answer.
        ranks: processes that share each batch; 1 trains in this one.
        threads: of each process.
        seed: of the order of the pairs, weights and negatives.
    """

    job: Literal["train_towers"] = "train_towers"
    name: str = Field(default="train_towers", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    method: Annotated[Choice, Kind("tower_training")] | None = None
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
    held: PositiveInt = 1000
    k: Annotated[int, Ge(1), Le(1000)] = 10
    ranks: Annotated[int, Ge(1), Le(64)] = 1
    threads: PositiveInt = 1
    seed: NonNegativeInt = 0

    def task(self) -> TowerTask:
        """How towers learn."""
        return TowerTask(**{name: getattr(self, name) for name in TowerTask.model_fields})


class TrainTowersPlan(Plan[TrainTowersJob]):
    """A plan of towers: its job has a method.

    Args:
        pairs: that are learned from.
        unlabelled: further queries.
    """

    pairs: int
    unlabelled: int


class TrainTowersReport(Report[TrainTowersPlan]):
    """A report of towers; its details have ``index``, the digest of the documents' vectors."""
