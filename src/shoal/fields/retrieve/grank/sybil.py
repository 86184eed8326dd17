"""How many invented peers move a document to the top for one user.

Signatures say whose a click is, not whether its owner is somebody: keys cost nothing. A stranger
counts little, but logs are public, and a peer that copies a user's clicks is similar to that user.
This says how far that goes; a trust function that knows real peers is the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.fields.retrieve.grank.entries import ClickEntry
from shoal.fields.retrieve.grank.ranking import GRank
from shoal.fields.retrieve.grank.text import terms

_MOST = 1024


def sybils_needed(
    documents: Mapping[str, str],
    entries: Iterable[ClickEntry],
    me: str,
    query: str,
    item: str,
    *,
    copying: bool,
) -> int:
    """Peers, in powers of two, that make an item the first for a query; 0 if 1,024 do not.

    Args:
        documents: name -> text.
        entries: the clicks that are known.
        me: whose ranking it is.
        query: that is attacked.
        item: that is pushed.
        copying: each also repeats the clicks of ``me`` under other words.
    """
    ranking, mine, attacked = GRank(documents, me), [], set(terms(query))
    for entry in entries:
        ranking.add(entry)
        # Clicks under the same words would hold up what is there.
        if entry.peer == me and attacked.isdisjoint(terms(entry.query)):
            mine.append(entry)
    made, count = 0, 1
    while count <= _MOST:
        for at in range(made, count):
            peer = f"invented-{at}"
            copied = [(one.query, one.item) for one in mine] if copying else []
            for number, (words, what) in enumerate([(query, item), *copied], 1):
                ranking.add(
                    ClickEntry(
                        peer=peer, number=number, query=words, item=what, shown=(what,), time=0.0
                    )
                )
        made = count
        if ranking.rank(query, limit=1)[0].item == item:
            return count
        count *= 2
    return 0
