"""The values of a job ``datastore``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.retrieve.datastore.protocols import RetrievalOptions
from shoal.ir import Job, Plan, Report


class DatastoreJob(Job):
    """Build a datastore, and measure what its size is worth to language models.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a file or directory of text, or ``stdlib``; with ``store``, where held-out text lies.
        sources: further files and directories.
        pattern: of the names of files; ``*`` also matches ``/``.
        heldout: a file or directory whose text is judged, and is not stored; empty for one of 20
            files of the data.
        store: a datastore that is there, which is asked; empty builds one in the run's directory.
        method: how passages are found; None lets the planner choose.
        passage_words: of a passage, at most.
        sentences: end passages at ends of sentences.
        shard_passages: of a shard.
        k: passages that a query gets.
        depth: passages that are searched for each query; more where too few are left.
        decontaminate: drop passages that repeat the text that is judged.
        dedupe: of passages that are nearly the same, keep the best.
        rerank: embedder by whose similarity the first passages are put in a new order.
        shares: sizes of the datastore that are compared, as shares of the whole.
        seeds: samples of each size.
        filters: rules of a second sweep, in which passages that break one are dropped; none for no
            second sweep.
        readers: Hugging Face directories or models of the zoo whose perplexity is measured, which
            share a tokenizer; none measures lists alone.
        training_tokens: that each reader has read, for the front over its training.
        window: tokens; the second half of each window is scored.
        stride: tokens from one window of a file to the next.
        windows: that are scored, at most; queries, where there is no reader.
        pool: where shards are built: None for this process, ``local``, ``ray``.
        workers: shards that are in work at a time.
        threads: for building, searching and reading.
        seed: of samples, and of what is random in an index.
    """

    job: Literal["datastore"] = "datastore"
    name: str = Field(default="datastore", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    sources: tuple[str, ...] = ()
    pattern: str = "*"
    heldout: str = ""
    store: str = ""
    method: Annotated[Choice, Kind("passage_index")] | None = None
    passage_words: Annotated[int, Ge(8), Le(65_536)] = 256
    sentences: bool = False
    shard_passages: PositiveInt = 50_000
    k: PositiveInt = 3
    depth: PositiveInt = 1000
    decontaminate: bool = True
    dedupe: bool = True
    rerank: Annotated[Choice, Kind("embedder")] | None = None
    shares: Annotated[tuple[Annotated[float, Gt(0), Le(1)], ...], MinLen(1)] = tuple(
        2.0**-power for power in range(6, -1, -1)
    )
    seeds: PositiveInt = 3
    filters: tuple[Annotated[Choice, Kind("text_filter")], ...] = ()
    readers: tuple[str, ...] = ()
    training_tokens: tuple[PositiveInt, ...] = ()
    window: Annotated[int, Ge(2)] = 1024
    stride: PositiveInt = 512
    windows: PositiveInt = 64
    pool: Annotated[Choice, Kind("pool")] | None = None
    workers: PositiveInt = 1
    threads: PositiveInt = 1
    seed: NonNegativeInt = 0

    def retrieval(self) -> RetrievalOptions:
        """The steps from a list of passages to the first few.

        Raises:
            ConfigError: fewer passages are searched than are wanted.
        """
        return RetrievalOptions(
            k=self.k, depth=self.depth, decontaminate=self.decontaminate, dedupe=self.dedupe,
            rerank=self.rerank,
        )  # fmt: skip


class DatastorePlan(Plan[DatastoreJob]):
    """A datastore's plan: its job has a method.

    Args:
        passages: about how many.
        num_bytes: of the text that is stored.
    """

    passages: int
    num_bytes: int


class DatastoreReport(Report[DatastorePlan]):
    """A datastore's report; its details have ``points``: loss by reader, size and filters."""
