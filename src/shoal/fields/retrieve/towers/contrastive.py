"""Stage 1: both towers learn which document answers which query.

Negatives are the other documents of the step, of all ranks, and documents that the towers of the
pass before ranked 30 to 200 for its queries.

Source: Huang et al., ScalingNote, 2024; van den Oord et al., Representation Learning with
Contrastive Predictive Coding, 2018 (InfoNCE).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.parts import table
from shoal.core.random import Permutation, generator
from shoal.corpora import tokenizer as tokenizers
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.towers.pair import TowerPair
from shoal.fields.retrieve.towers.protocols import TextPairs, Tick, TowerError, TowerTask
from shoal.fields.retrieve.towers.shapes import backbone_directory, config_of
from shoal.fields.retrieve.towers.tower import TextTower, TowerSettings, products
from shoal.model import huggingface

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shoal.ir.comm import Comm

# Ranks of a mined negative among all documents.
_FIRST, _LAST = 30, 200
# Width of a tower whose learning rate is that of the task.
_WIDTH = 128


def info_nce(
    queries_BD: Tensor, documents_ND: Tensor, temperature: float, first: int = 0
) -> Tensor:
    """Mean cross-entropy of choosing the right document, in nats.

    Args:
        queries_BD: of length 1.
        documents_ND: of length 1; that of query i has the number ``first + i``.
        temperature: by which cosines are divided.
        first: number of the first query's document.

    Raises:
        TowerError: there is one document, which is no choice.
    """
    if len(documents_ND) < 2:
        raise TowerError("batch = 1: a query needs another document beside its own; use 2 or more")
    scores = queries_BD @ documents_ND.T / temperature
    return F.cross_entropy(scores, torch.arange(first, first + len(queries_BD)))


def gathered(own: Tensor, comm: Comm | None) -> Tensor:
    """The rows of all ranks in their order; a gradient flows through those of this rank alone.

    Where every rank computes the loss over all rows and gradients are summed over ranks, the sum
    is the gradient of one process with all rows.
    """
    if comm is None or comm.world == 1:
        return own
    rows = own.detach().contiguous()
    whole = rows.new_empty(comm.world * len(rows), *rows.shape[1:])
    comm.all_gather(whole, rows, tag="towers").wait()
    parts = list(whole.chunk(comm.world))
    parts[comm.rank] = own
    return torch.cat(parts)


def fresh_pair(task: TowerTask, backbone: str, pairs: TextPairs) -> TowerPair:
    """Two towers that begin as the same decoder, with one tokenizer.

    Raises:
        TowerError: no such backbone.
        ModelError: a directory that cannot be read.
    """
    config = config_of(task, backbone)
    directory = backbone_directory(backbone)
    if directory is None:
        tokenizer = learned_tokenizer(task, pairs)
    else:
        tokenizer = tokenizers.load(directory)
        tokenizers.check_vocab(tokenizer, config.vocab_size, str(directory))
    settings = TowerSettings(
        dim=task.dim or config.hidden,
        length=task.query_length,
        prompt=task.query_prompt,
        pooling=task.pooling,
    )
    if directory is None:
        query = TextTower.fresh(config, tokenizer, settings, task.seed)
    else:
        query = TextTower(
            huggingface.read(directory, torch.float32, packed=False), tokenizer, settings
        )
    for_documents = {"length": task.document_length, "prompt": task.document_prompt}
    settings = settings.model_copy(update=for_documents)
    backbone_too = query.backbone if task.shared else copy.deepcopy(query.backbone)
    document = TextTower(backbone_too, tokenizer, settings)
    if task.shared:
        document.head = query.head
    return TowerPair(query, document)


def learned_tokenizer(task: TowerTask, pairs: TextPairs) -> Tokenizer:
    """A tokenizer of the texts that are learned from."""
    texts = [*pairs.queries, *pairs.documents]
    size = sum(len(one.encode("utf-8", "replace")) for one in texts)
    clean = (one.encode("utf-8", "replace").decode() for one in texts)
    return tokenizers.train(tokenizers.sample(clean, size), task.vocab)


def train_pair(
    task: TowerTask,
    backbone: str,
    pairs: TextPairs,
    tick: Tick,
    comm: Comm | None = None,
) -> TowerPair:
    """Train two towers on pairs; all ranks end with the same weights.

    Args:
        task: how.
        backbone: of both.
        pairs: the same on all ranks, of which each takes its share of every batch.
        tick: called with the share that is done.
        comm: the ranks.

    Raises:
        TowerError: a batch of one pair, or one that the ranks cannot share out.
    """
    world = 1 if comm is None else comm.world
    batch = min(task.batch, len(pairs)) // world * world
    if min(task.batch, len(pairs)) < 2 or task.batch % world:
        raise TowerError(
            f"batch = {task.batch} of {len(pairs)} pairs on {world} ranks: expected 2 or more, and "
            "as many on each rank"
        )
    pair = fresh_pair(task, backbone, pairs)
    queries, documents = pair.query.tokens(pairs.queries), pair.document.tokens(pairs.documents)
    learning = PairTraining(task, pair, comm)
    steps = len(pairs) // batch
    hard: np.ndarray | None = None
    for epoch in range(task.epochs):
        if epoch and task.hard_share:
            hard = mined(task, pair, queries, documents)
        order = Permutation(len(pairs), task.seed, epoch)(np.arange(len(pairs)))
        for step in range(steps):
            done = epoch * steps + step
            rows = order[step * batch : (step + 1) * batch]
            extra = np.empty(0, np.int64) if hard is None else _drawn(task, hard, rows, done, world)
            loss = learning.step(
                [queries[at] for at in rows],
                [documents[at] for at in (*rows, *extra)],
                done / (task.epochs * steps),
            )
            tick((done + 1) / (task.epochs * steps), f"pairs, loss {loss:.3f}")
    pair.query.eval()
    pair.document.eval()
    return pair


class PairTraining:
    """Two towers with their optimizer.

    Args:
        task: how they learn.
        pair: the towers.
        comm: ranks, each of which takes its share of a step.
    """

    def __init__(self, task: TowerTask, pair: TowerPair, comm: Comm | None = None) -> None:
        self.task, self.pair, self.comm = task, pair, comm
        self.towers = nn.ModuleDict({"query": pair.query, "document": pair.document}).train()
        self._update = updates(self.towers, task.lr)

    def step(
        self, queries: Sequence[np.ndarray], documents: Sequence[np.ndarray], done: float
    ) -> float:
        """One update; the loss.

        Args:
            queries: token ids of B queries, of all ranks.
            documents: of the B documents that answer them, and of further ones that do not.
            done: share of the training that is behind.
        """
        comm, batch = self.comm, len(queries)
        world, rank = (1, 0) if comm is None else (comm.world, comm.rank)

        def own(rows: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            each = len(rows) // world
            return rows[rank * each : (rank + 1) * each]

        with products(self.task.precision):
            q = self.pair.query(own(queries))
            # Answers and negatives lie behind each other on each rank; together they are gathered.
            d = self.pair.document([*own(documents[:batch]), *own(documents[batch:])])
        answers = gathered(d[: batch // world], comm)
        negatives = d[batch // world :]
        if len(documents) > batch:
            answers = torch.cat([answers, gathered(negatives, comm)])
        loss = info_nce(gathered(q, comm), answers, self.task.temperature)
        loss.backward()  # type: ignore[no-untyped-call]
        if comm is not None and world > 1:
            for parameter in self.towers.parameters():
                if parameter.grad is not None:  # an output matrix of its own is not used
                    comm.all_reduce(parameter.grad, tag="towers").wait()
        self._update(done)
        return float(loss.detach())


def updates(module: nn.Module, lr: float) -> Callable[[float], None]:
    """What updates a module from its gradients, given the share of the training that is behind."""
    widest = max(
        one.backbone.config.hidden for one in module.modules() if isinstance(one, TextTower)
    )
    # Wider layers need smaller steps: large towers would fall to one vector for all texts.
    rule = {"name": "adamw", "lr": lr * _WIDTH / widest, "weight_decay": 0.01}
    named = dict(module.named_parameters())
    updater = table("optimizer").build(rule).build(named)
    schedule = table("lr_schedule").build({"name": "cosine", "warmup": 0.1})

    def update(done: float) -> None:
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        updater.step(schedule.factor(done, 1.0))
        for parameter in named.values():
            parameter.grad = None

    return update


def mined(
    task: TowerTask,
    pair: TowerPair,
    queries: Sequence[np.ndarray],
    documents: Sequence[np.ndarray],
) -> np.ndarray:
    """For each query a document of rank 30 to 200 that seems no answer, -1 where there is none.

    Args:
        task: margin and seed.
        pair: the towers as they are.
        queries: token ids of N queries.
        documents: of their documents.

    Returns:
        int64 [N]: numbers of documents.
    """
    q = pair.query.encode_tokens(queries, task.precision)
    d = pair.document.encode_tokens(documents, task.precision)
    last = min(_LAST, len(d))
    near = exact_neighbours(d, q, last, "cosine")
    right = np.einsum("nd,nd->n", q, d)
    ranks = np.arange(last)
    # Few documents have no ranks beyond 30; then all but the nearest may be drawn.
    far = ranks >= min(_FIRST, last // 2)
    # Distances of cosine are -cosine.
    fit = far & (-near.distances < (right - task.hard_margin)[:, None])
    fit &= near.ids != np.arange(len(q))[:, None]
    draw = np.where(fit, generator(task.seed, purpose="hard negatives").random(fit.shape), -1.0)
    best = draw.argmax(1)
    rows = np.arange(len(q))
    return np.where(draw[rows, best] < 0, -1, near.ids[rows, best]).astype(np.int64)


def _drawn(
    task: TowerTask, hard: np.ndarray, rows: np.ndarray, step: int, world: int
) -> np.ndarray:
    """Mined negatives of a step: of some of its queries, none of them an answer in it."""
    found = np.setdiff1d(hard[rows], [-1])
    found = found[~np.isin(found, rows)]
    count = min(int(task.hard_share * len(rows)), len(found)) // world * world
    rng = generator(task.seed, purpose="hard negatives of a step", step=step)
    return rng.permutation(found)[:count]
