"""Association rules among frequent sets: antecedent, consequent, and how often both occur."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.fields.data.mine.miners.native import find_rules
from shoal.fields.data.mine.protocols import Itemsets
from shoal.fields.data.readers import arrow

MAX_RULES = 50_000_000


def sets_table(found: Itemsets) -> Any:
    """Sets as an Arrow table: ``items`` (list), ``support`` (share of baskets), ``count``."""
    pa = arrow()
    ends = np.concatenate([np.zeros(1, np.int64), found.ends])
    return pa.table(
        {
            "items": pa.LargeListArray.from_arrays(
                pa.array(ends), _named(found.names, found.items)
            ),
            "support": found.support / max(found.num_baskets, 1),
            "count": found.support.astype(np.int64),
        }
    )


def rules_table(found: Itemsets, min_confidence: float, limit: int = MAX_RULES) -> Any:
    """All rules of a confidence, the most confident first.

    Columns: ``antecedent`` and ``consequent`` (lists), ``support`` (share of all baskets that have
    both), ``confidence`` (share of those with the antecedent), ``lift`` (confidence over the
    consequent's share), ``leverage`` (support minus that of independent sides), ``conviction`` (how
    much more often independent sides would fail; infinite for a rule without exception).

    Source: Agrawal, Srikant, 1994; Brin et al., Dynamic Itemset Counting and Implication Rules for
    Market Basket Data, 1997 (lift, conviction); Piatetsky-Shapiro, 1991 (leverage).

    Raises:
        TooManyError: more than the limit.
    """
    pa = arrow()
    parts = find_rules(found, min_confidence, limit)
    baskets = float(max(found.num_baskets, 1))
    both = found.support[parts.sets] / baskets
    given, then = parts.antecedent / baskets, parts.consequent / baskets
    confidence = found.support[parts.sets] / parts.antecedent
    with np.errstate(divide="ignore", invalid="ignore"):
        conviction = np.where(confidence < 1, (1 - then) / (1 - confidence), np.inf)
    lengths = found.lengths[parts.sets]
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    items = found.items[np.repeat((found.ends - found.lengths)[parts.sets], lengths) + within]
    bits = np.repeat(parts.masks, lengths) >> within.astype(np.uint64)
    in_consequent = (bits & np.uint64(1)).astype(np.bool_)

    def side(chosen: np.ndarray) -> Any:
        counted = np.concatenate([np.zeros(1, np.int64), np.cumsum(chosen)])
        places = np.concatenate([np.zeros(1, np.int64), ends])
        return pa.LargeListArray.from_arrays(
            pa.array(counted[places]), _named(found.names, items[chosen])
        )

    table = pa.table(
        {
            "antecedent": side(~in_consequent),
            "consequent": side(in_consequent),
            "support": both,
            "confidence": confidence,
            "lift": confidence / then,
            "leverage": both - given * then,
            "conviction": conviction,
        }
    )
    order = np.lexsort((-both, -confidence))
    return table.take(pa.array(order))


def _named(names: Any, ids: np.ndarray) -> Any:
    pa = arrow()
    known = names if isinstance(names, pa.Array) else pa.array(names)
    return known.take(pa.array(ids))
