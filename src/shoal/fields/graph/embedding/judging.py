"""How much vectors say about labels: Micro-F1 and Macro-F1.

A node with one label gets the likeliest; where nodes have several, it gets as many as it has, as
in DeepWalk's evaluation (Perozzi et al., 2014, section 5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import require
from shoal.core.extras import import_extra
from shoal.core.random import generator
from shoal.fields.graph.graph import NodeLabels

# Inverse strengths of the penalty of logistic regression.
_PENALTIES = (1.0, 0.1, 0.01)
# Nodes that options are tuned by at most: a matrix of all pairs of them is decomposed.
_TUNING = 1000
# Of the ridge that options are tuned with, over the numbers of a vector.
_RIDGES = (0.1, 1.0, 10.0)


class F1Scores(NamedTuple):
    """What a classifier reaches on nodes that it has not seen.

    Args:
        micro: over all labels of all nodes.
        macro: mean over the labels that occur.
    """

    micro: float
    macro: float


class JudgedNodes(NamedTuple):
    """Nodes with labels, as they are divided.

    Args:
        train: of which the classifier learns.
        test: of which it is judged.
        tuning: those of ``train`` by whose labels options may be chosen.
    """

    train: np.ndarray
    test: np.ndarray
    tuning: np.ndarray


def divided(
    labels: NodeLabels, *, train_share: float, tuning_share: float, most: int, seed: int
) -> JudgedNodes:
    """Draw the nodes that are judged, and divide them.

    Args:
        labels: of all nodes.
        train_share: of the nodes drawn.
        tuning_share: of the nodes drawn, from 20 to 1000 nodes; they are among ``train``.
        most: nodes that are drawn; 0 for all with a label.
        seed: of the draw.

    Raises:
        ConfigError: there are fewer than ten nodes with a label.
    """
    known = labels.labelled
    require(len(known) >= 10, "labels", len(known), expected="at least 10 nodes with a label")
    order = generator(seed, purpose="judged nodes").permutation(known)[: most or None]
    cut = min(max(2, round(train_share * len(order))), len(order) - 1)
    tuning = min(max(20, round(tuning_share * len(order))), _TUNING, cut)
    return JudgedNodes(*(np.sort(one) for one in (order[:cut], order[cut:], order[:tuning])))


def only(labels: NodeLabels, nodes: np.ndarray) -> NodeLabels:
    """The labels of some nodes; the others have none."""
    sizes = np.zeros(labels.num_nodes, np.int64)
    sizes[nodes] = np.diff(labels.indptr)[nodes]
    kept = labels.take(np.sort(nodes))
    return NodeLabels(np.concatenate([[0], np.cumsum(sizes)]), kept.indices, labels.names)


def judged_f1(vectors: np.ndarray, labels: NodeLabels, nodes: JudgedNodes) -> F1Scores:
    """F1 of logistic regression that learns of some nodes and names the labels of others.

    Numbers are scaled by the mean and deviation of the nodes that it learns of. The penalty is the
    one of three with which two thirds of these name the last third best, so that no embedding
    gains by how long its vectors are.

    Args:
        vectors: float32 [N, d].
        labels: of the N nodes.
        nodes: how they are divided.
    """
    cut = max(1, 2 * len(nodes.train) // 3)
    order = generator(0, purpose="penalty").permutation(nodes.train)
    begin, rest = order[:cut], order[cut:]
    best = _PENALTIES[0]
    if len(rest):
        tried = {one: _f1(vectors, labels, begin, rest, one).micro for one in _PENALTIES}
        best = max(tried, key=lambda one: tried[one])
    return _f1(vectors, labels, nodes.train, nodes.test, best)


def _f1(
    vectors: np.ndarray, labels: NodeLabels, train: np.ndarray, test: np.ndarray, c: float
) -> F1Scores:
    linear: Any = import_extra("sklearn.linear_model", extra="fields", purpose="judging vectors")
    rows = vectors[train].astype(np.float64)
    mean, spread = rows.mean(axis=0), rows.std(axis=0)
    spread[spread == 0] = 1.0
    rows, others = (rows - mean) / spread, (vectors[test] - mean) / spread
    truth, known = labels.take(test).dense(), labels.take(train)
    wanted = known.dense()
    scores = np.full(truth.shape, -np.inf)
    always = wanted.all(axis=0)
    scores[:, always] = np.inf
    learned = np.flatnonzero(wanted.any(axis=0) & ~always)

    def fit(target: np.ndarray) -> Any:
        return linear.LogisticRegression(C=c, max_iter=1000).fit(rows, target)

    if labels.single and len(learned) > 2:
        scores[:, learned] = fit(known.indices).decision_function(others)
    else:
        for label in learned:
            scores[:, label] = fit(wanted[:, label]).decision_function(others)
    return f1_of(truth, highest(scores, truth.sum(axis=1)))


def highest(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The labels with the highest scores of each node, as many as it has; bool [n, L]."""
    order = np.argsort(-scores, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(scores.shape[1])[None], axis=1)
    return np.asarray(rank < counts[:, None])


def f1_of(truth: np.ndarray, named: np.ndarray) -> F1Scores:
    """Scores of labels that were named, bool [n, L] both."""
    both, either = (truth & named).sum(axis=0), truth.sum(axis=0) + named.sum(axis=0)
    there = either > 0
    return F1Scores(
        micro=float(2 * both.sum() / max(either.sum(), 1)),
        macro=float((2 * both[there] / either[there]).mean()) if there.any() else 0.0,
    )


def left_out_f1(vectors: np.ndarray, labels: NodeLabels) -> float:
    """Micro-F1 of ridge regression that names the labels of each node from all the others'.

    Every node is left out in turn, which the decomposition of one matrix answers for all of them
    (Allen, 1974); the best of three ridges counts.

    Args:
        vectors: float32 [n, d], at least two.
        labels: of the n nodes.
    """
    rows = vectors.astype(np.float64)
    spread = rows.std(axis=0)
    rows = (rows - rows.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    truth = labels.dense()
    wanted = 2.0 * truth - 1.0
    values, basis = np.linalg.eigh(rows @ rows.T + 1.0)
    counts, best = truth.sum(axis=1), 0.0
    for ridge in _RIDGES:
        share = np.maximum(values, 0.0) / (np.maximum(values, 0.0) + ridge * vectors.shape[1])
        hat = (basis * share) @ basis.T
        own = np.minimum(np.diag(hat), 1 - 1e-9)[:, None]
        scores = (hat @ wanted - own * wanted) / (1 - own)
        best = max(best, f1_of(truth, highest(scores, counts)).micro)
    return best
