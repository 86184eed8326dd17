"""The two tasks of the pruning claim: digits, and which photograph a patch is of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

from shoal.core.parts import table
from shoal.core.random import generator
from shoal.corpora.photos import photo_descriptors
from shoal.fields.data.prune.protocols import PruneExamples
from shoal.fields.data.prune.scorers.networks import SmallNetworks, standardized
from shoal.fields.data.prune.scoring import scored

# Steps of every network, whatever it learns from, and networks whose accuracy is averaged.
_STEPS, _NETWORKS = 600, 3
# Patches lie whole in a block of the image, and blocks are for training or for tests.
_BLOCK, _PATCH, _TESTED = 48, 16, 0.3


class PruneTask(NamedTuple):
    """Rows to learn from and to test on.

    Args:
        draw: number -> training rows and test rows.
        scorer: with labels, whose hard and easy rows are compared.
        few: rows where data are scarce.
        many: rows where they are plentiful.
    """

    draw: Callable[[int], tuple[PruneExamples, PruneExamples]]
    scorer: str
    few: int
    many: int

    def correlation(self, train: PruneExamples, seed: int) -> float:
        """Rank correlation of the label-free score with the labelled one."""
        free, labelled = (
            scored(table("data_scorer").build(name), train, seed)
            for name in ("ssl_prototypes", self.scorer)
        )
        return float(stats.spearmanr(free, labelled).statistic)


def kept(examples: PruneExamples, scorer: str, side: str, keep: float, seed: int) -> PruneExamples:
    """The examples that a score of themselves chooses."""
    scores = scored(table("data_scorer").build(scorer), examples, seed)
    selector = table("data_selector").build({"name": "balanced", "side": side})
    return examples.take(selector.select(scores, round(keep * len(scores)), groups=examples.y))


def accuracy(train: PruneExamples, test: PruneExamples, seed: int) -> float:
    """Mean accuracy of networks that learn from so many steps."""
    networks = SmallNetworks(_NETWORKS, train.X.shape[1], train.classes, seed=seed)
    networks.train(standardized(train.X), train.labels, steps=_STEPS)
    return float(networks.right(standardized(test.X, train.X), test.labels).mean())


def _digits(number: int) -> tuple[PruneExamples, PruneExamples]:
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    order = generator(number, purpose="digits split").permutation(len(X))
    data = PruneExamples((X / 16).astype(np.float32), y.astype(np.int64), 10).take(order)
    return data.take(np.arange(597, len(X))), data.take(np.arange(597))


def _photos(number: int) -> tuple[PruneExamples, PruneExamples]:
    found = photo_descriptors(120_000)
    draw = generator(number, purpose="photo blocks")
    block = found.corner // _BLOCK
    whole = (found.corner % _BLOCK <= _BLOCK - _PATCH).all(axis=1)
    tested = draw.random((2, *block.max(axis=0) + 1)) < _TESTED
    of_test = tested[found.photo, block[:, 0], block[:, 1]]
    data = PruneExamples(found.vectors, found.photo, 2)
    train = draw.permutation(np.flatnonzero(whole & ~of_test))[:8000]
    return data.take(train), data.take(draw.choice(np.flatnonzero(whole & of_test), 3000, False))


PRUNE_TASKS = {
    "digits": PruneTask(_digits, "prototypes", 100, 1200),
    "photos": PruneTask(_photos, "margin", 150, 8000),
}
"""Name -> task."""
