"""The batches of a training run: the rows that a rank is given in each step, and what they count.

A batch is a function of the seed and the step. Which targets count follows from documents, from
what the corpus says is learned, from ``learn_after`` and from masking
(:mod:`shoal.train.masking`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal.core.parts import table
from shoal.corpora.order import batch
from shoal.model.loss import IGNORE
from shoal.parallel.pipeline.actor import prefetch
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.train import masking

if TYPE_CHECKING:
    from shoal.corpora.tokens import TokenSet
    from shoal.ir import TrainJob
    from shoal.parallel.engine import ParallelEngine


class BatchSource:
    """The rows of this rank, read and completed while the step before computes.

    Args:
        job: the job with every choice made.
        tokens: the prepared corpus.
        engine: assigns rows to this rank and completes them.

    Raises:
        ConfigError: the job's ``learn_after`` is no single token.
    """

    def __init__(self, job: TrainJob, tokens: TokenSet, engine: ParallelEngine) -> None:
        self._job, self._tokens, self._engine = job, tokens, engine
        self._packing = table("packing").build(job.packing)
        self._mark = None if job.learn_after is None else masking.mark_of(job.learn_after, tokens)
        self._ahead = prefetch(lambda step: engine.prepare(self.read(step)), 0)
        self.get = self._ahead.get
        self.close = self._ahead.close

    def read(self, step: int) -> ReplicaSequences:
        """The rows that this rank is given: of its replica, or all."""
        job, engine = self._job, self._engine
        replica, replicas = engine.reads or (0, 1)
        result = batch(
            self._tokens.train,
            self._packing,
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            seed=job.seed,
            step=step,
            rank=replica,
            world=replicas,
        )
        tokens = torch.from_numpy(result.tokens).to(engine.device, non_blocking=True)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        documents = None
        if result.documents is not None:
            documents = torch.from_numpy(result.documents).to(engine.device, non_blocking=True)
        first = replica * job.global_batch // replicas
        given = None if self._mark is None else masking.given(tokens, self._mark)
        if result.learned is not None:
            unlearned = torch.from_numpy(result.learned == 0).to(engine.device, non_blocking=True)
            given = unlearned if given is None else given | unlearned
        mask_id = engine.config.mask_token_id
        if mask_id is not None:
            hidden = masking.masked(
                inputs,
                mask_id,
                seed=job.seed,
                step=step,
                first=first,
                total=job.global_batch,
                kept_bT=None if given is None else given[:, :-1],
            )
            count = inputs.numel() if given is None else int((~given[:, :-1]).sum())
            documents = None if documents is None else documents[:, :-1]
            return ReplicaSequences(
                hidden.inputs, hidden.targets, documents, first, step, hidden.weights, count
            )
        if given is not None:
            targets = targets.masked_fill(given[:, 1:], IGNORE)
        if documents is not None:
            crossing = documents[:, 1:] != documents[:, :-1]
            targets, documents = targets.masked_fill(crossing, IGNORE), documents[:, :-1]
        counted = None
        if self._mark is not None:
            counted = int((targets != IGNORE).sum())
        elif result.learned is not None:  # here, where no device is waited for
            kept = result.learned[:, 1:] != 0
            if result.documents is not None:
                kept &= result.documents[:, 1:] == result.documents[:, :-1]
            counted = int(kept.sum())
        return ReplicaSequences(inputs, targets, documents, first, step, counted=counted)

    def count(self, rows: ReplicaSequences) -> float:
        """Counted tokens of all ranks that update together; they all call it."""
        job, engine = self._job, self._engine
        if rows.documents is None and rows.counted is None:
            return float(job.global_batch // engine.workers * job.seq_len)
        if rows.counted is not None:
            counted = torch.tensor(float(rows.counted), device=engine.device)
        else:
            counted = (rows.targets != IGNORE).sum().to(torch.float32)
        if engine.reads is not None:
            # Every rank of a replica has all of its rows; one of them counts.
            if not engine.first_of_replica:
                counted.zero_()
            engine.ranks.peers.all_reduce(counted, tag="count").wait()
        return max(1.0, float(counted))
