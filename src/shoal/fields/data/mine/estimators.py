"""Frequent sets as an estimator of scikit-learn: ``FrequentItemsets``."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data

from shoal.core.parts import Choice, table
from shoal.fields.data.mine.baskets import Baskets, from_arrow, from_lists, from_matrix
from shoal.fields.data.mine.planning import choose_miner
from shoal.fields.data.mine.protocols import (
    MineError,
    Miner,
    MiningProblem,
    Target,
    least_support,
)
from shoal.fields.data.mine.rules import rules_table, sets_table


class FrequentItemsets(BaseEstimator):  # type: ignore[misc]
    """Find sets of items that are in many baskets, by Apriori, Eclat or FP-growth.

    Args:
        min_support: a share of all baskets, a float in (0, 1]; or a number of them, an int.
        method: ``apriori``, ``eclat``, ``fpgrowth``; or ``auto``, which chooses by the shape of the
            data.
        target: ``all`` frequent sets; ``closed``, those of which no larger one has the support;
            ``maximal``, those of which no larger one is frequent.
        max_len: most items of a set; None for any number.
        max_itemsets: more sets are an error, raised before the memory is full.

    Attributes:
        itemsets_: Arrow table with columns ``items``, ``support`` (a share) and ``count``.
        n_baskets_: baskets, the empty ones too.
        method_: that was used.

    Examples:
        >>> model = FrequentItemsets(min_support=2).fit([["a", "b"], ["a", "b", "c"], ["c"]])
        >>> sorted(map(tuple, model.itemsets_["items"].to_pylist()))
        [('a',), ('b',), ('b', 'a'), ('c',)]
    """

    def __init__(
        self,
        min_support: float = 0.1,
        *,
        method: str = "auto",
        target: Target = "all",
        max_len: int | None = None,
        max_itemsets: int = 10_000_000,
    ) -> None:
        self.min_support = min_support
        self.method = method
        self.target = target
        self.max_len = max_len
        self.max_itemsets = max_itemsets

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the sets.

        Args:
            X: baskets: a list of lists, tuples or sets of items; an Arrow array of lists; or a
                matrix or frame [baskets, items], dense or sparse, in which a number above zero
                says that the item is there.
            y: not used.

        Raises:
            MineError: an argument is out of bounds; X is none of these.
            TooManyError: more than ``max_itemsets``; says what would help.
        """
        self._check()
        baskets = self._baskets(X)
        least = least_support(self.min_support, baskets.num_baskets)
        problem = MiningProblem(
            baskets,
            least,
            target=self.target,
            max_len=self.max_len,
            max_itemsets=int(self.max_itemsets),
        )
        miner: Miner
        if self.method == "auto":
            miner = choose_miner(problem)
        else:
            miner = table("miner").build(Choice(name=self.method), where="method")
        self._found = miner.mine(problem)
        self.n_baskets_: int = baskets.num_baskets
        self.method_: str = table("miner").spell(miner).name
        return self

    @property
    def itemsets_(self) -> Any:
        """Arrow table: ``items``, ``support``, ``count``."""
        check_is_fitted(self, "_found")
        return sets_table(self._found)

    def rules(self, min_confidence: float = 0.8) -> Any:
        """Rules among the sets, the most confident first, as an Arrow table.

        Args:
            min_confidence: in (0, 1].

        Raises:
            MineError: only closed or maximal sets were found.
        """
        check_is_fitted(self, "_found")
        if self.target != "all":
            raise MineError(f'rules need all frequent sets: target="all", not {self.target!r}')
        if not 0 < min_confidence <= 1:
            raise MineError(f"min_confidence = {min_confidence}: expected a share in (0, 1]")
        return rules_table(self._found, min_confidence)

    def _check(self) -> None:
        if self.target not in ("all", "closed", "maximal"):
            raise MineError(f"target = {self.target!r}: expected all, closed or maximal")
        for name in ("max_len", "max_itemsets"):
            value = getattr(self, name)
            if value is None and name == "max_len":
                continue
            if not isinstance(value, int | np.integer) or value < 1:
                raise MineError(f"{name} = {value!r}: expected a whole number from 1 on")

    def _baskets(self, X: Any) -> Baskets:
        if isinstance(X, Baskets):
            return X
        if type(X).__module__.partition(".")[0] == "pyarrow":
            return from_arrow(X)
        if not hasattr(X, "shape") and not hasattr(X, "__array__"):
            return from_lists(X)
        if getattr(X, "ndim", 2) == 1 and getattr(X.dtype, "kind", "") == "O":
            return from_lists(list(X))  # a column of lists
        names = getattr(X, "columns", None)
        checked = validate_data(self, X, accept_sparse="csr", dtype="numeric")
        return from_matrix(checked, None if names is None else list(names))

    def __sklearn_tags__(self) -> Any:
        """Sparse matrices are taken; nothing is predicted."""
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
