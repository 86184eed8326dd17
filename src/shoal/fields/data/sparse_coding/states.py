"""The states of a point's causes that are looked at, and the prior that is cut off with them.

A state says which causes are active, with which values. Of a point are looked at: the state without
causes, all with one, and all with two to gamma of the point's H' candidates. A prior that is cut
off at gamma active causes is divided by the mass A that is left, so that it stays a probability.

Source: Luecke, Eggert, Expectation Truncation and the Benefits of Preselection in Training
Generative Models, 2010.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.fields.data.sparse_coding.models.native import library
from shoal.fields.data.sparse_coding.protocols import CauseTree, Floats, Ids, SparseCodeError

MAX_ACTIVE = 16
# Combinations of a point beyond these take gigabytes for a batch, and minutes for a pass.
_MOST = 2**17


@dataclass(frozen=True)
class StateSpace:
    """States, in this order: none active; one, value by value; combinations of candidates.

    Args:
        num_components: H.
        num_candidates: H', candidates of a point.
        num_active: gamma, most active causes of a state.
        values: m values of a cause beside 0.

    Raises:
        SparseCodeError: gamma > H', H' > H, or more states than can be looked at.
    """

    num_components: int
    num_candidates: int
    num_active: int
    values: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        H, some, most = self.num_components, self.num_candidates, self.num_active
        if not 1 <= some <= H:
            raise SparseCodeError(
                f"candidates = {some}: expected 1 to {H}, as there are {H} components"
            )
        if not 1 <= most <= min(some, MAX_ACTIVE):
            raise SparseCodeError(
                f"active = {most}: expected 1 to {min(some, MAX_ACTIVE)}, as causes are active "
                f"among {some} candidates; give fewer active or more candidates"
            )
        if self.num_combinations > _MOST:
            raise SparseCodeError(
                f"{self.num_combinations:,} combinations of up to {most} of {some} candidates "
                f"with {len(self.values)} values: expected at most {_MOST:,}; give fewer "
                "candidates, active or values"
            )

    @property
    def num_combinations(self) -> int:
        """K."""
        from math import comb

        m = len(self.values)
        return sum(comb(self.num_candidates, g) * m**g for g in range(2, self.num_active + 1))

    @property
    def num_states(self) -> int:
        """M."""
        return 1 + len(self.values) * self.num_components + self.num_combinations

    @property
    def first_combination(self) -> int:
        """Place of the first combination among the states."""
        return 1 + len(self.values) * self.num_components

    @functools.cached_property
    def combinations(self) -> Floats:
        """[K, H']: value of each candidate in each combination."""
        rows = np.zeros((self.num_combinations, self.num_candidates))
        at = 0
        for size in range(2, self.num_active + 1):
            for places in itertools.combinations(range(self.num_candidates), size):
                for values in itertools.product(self.values, repeat=size):
                    rows[at, places] = values
                    at += 1
        return rows

    @functools.cached_property
    def places(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """[K] active candidates of each combination, and [K, gamma] which; padded with 0."""
        active = self.combinations != 0
        sizes = active.sum(1).astype(np.int32)
        which = np.zeros((self.num_combinations, self.num_active), np.int32)
        for row, line in enumerate(active):
            chosen = np.flatnonzero(line)
            which[row, : len(chosen)] = chosen
        return sizes, which

    @functools.cached_property
    def counts(self) -> Floats:
        """[K, m]: how often each value occurs in each combination."""
        return np.stack([(self.combinations == v).sum(1) for v in self.values], 1).astype(float)

    @functools.cached_property
    def tree(self) -> CauseTree:
        """The combinations, each beside the one that it extends by a cause."""
        sizes, which = self.places
        worth, parents = np.zeros_like(which), np.zeros_like(sizes)
        numbers = {value: at for at, value in enumerate(self.values)}
        some, known = self.num_candidates, dict[tuple[tuple[int, int], ...], int]()
        for value, place in itertools.product(range(len(self.values)), range(some)):
            known[((place, value),)] = value * some + place
        for row, (size, places) in enumerate(zip(sizes, which, strict=True)):
            chosen = places[:size]
            worth[row, :size] = [numbers[value] for value in self.combinations[row, chosen]]
            key = tuple(zip(chosen.tolist(), worth[row, :size].tolist(), strict=True))
            parents[row] = known[key[:-1]]
            known[key] = len(self.values) * some + row
        return CauseTree(sizes, which, worth, parents)

    def choose(self, scores: Floats) -> Ids:
        """Int64 [B, H'], ascending: the causes with the greatest scores [B, H]."""
        best = np.empty((len(scores), self.num_candidates), np.int64)
        library().choose(np.ascontiguousarray(scores), best)
        return best

    def means(self, posterior: Floats, candidates: Ids) -> Floats:
        """[B, H]: expected values of the causes.

        Args:
            posterior: [B, M].
            candidates: [B, H'].
        """
        H, first = self.num_components, self.first_combination
        single = posterior[:, 1:first].reshape(len(posterior), -1, H)
        result: Floats = np.einsum("bvh,v->bh", single, self.values)
        combined = posterior[:, first:] @ self.combinations
        rows = np.arange(len(posterior))[:, None]
        result[rows, candidates] += combined
        return result

    def value_counts(self, posterior: Floats) -> Floats:
        """[m]: expected number of active causes with each value, over all points."""
        first = self.first_combination
        total = posterior.sum(0)
        single = total[1:first].reshape(-1, self.num_components).sum(1)
        counts: Floats = single + total[first:] @ self.counts
        return counts

    def state(self, index: int, candidates: Ids) -> Floats:
        """[H]: the values of the causes in one state of a point.

        Args:
            index: of the state.
            candidates: [H'], of the point.
        """
        result = np.zeros(self.num_components)
        if index >= self.first_combination:
            result[candidates] = self.combinations[index - self.first_combination]
        elif index:
            value, cause = divmod(index - 1, self.num_components)
            result[cause] = self.values[value]
        return result


def truncated_prior(rates: Floats, most: int) -> tuple[float, Floats]:
    """A prior of independent causes, cut off at a number of active ones.

    Args:
        rates: [H], probability that each cause is active.
        most: gamma.

    Returns:
        log A, the log of the mass that is left, and [H] the probability that a cause is active
        under what is left. With one rate pi for all, its sum is B / A: the mean number of active
        causes.
    """
    H = len(rates)
    if most >= H:
        return 0.0, rates.copy()
    # before[h], after[h]: how many of the causes below h, and from h on, are active: [gamma + 1].
    before, after = np.zeros((H + 1, most + 1)), np.zeros((H + 1, most + 1))
    before[0, 0] = after[H, 0] = 1.0
    for h in range(H):
        before[h + 1] = (1 - rates[h]) * before[h]
        before[h + 1, 1:] += rates[h] * before[h, :-1]
        back = H - 1 - h
        after[back] = (1 - rates[back]) * after[back + 1]
        after[back, 1:] += rates[back] * after[back + 1, :-1]
    mass = before[H].sum()
    # With cause h active, at most gamma - 1 of the others are.
    upto = np.cumsum(after, axis=1)[1:, :most][:, ::-1]
    others = np.einsum("hg,hg->h", before[:-1, :most], upto)
    return float(np.log(mass)), rates * others / mass
