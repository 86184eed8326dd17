"""Sources in which every document has a token of its own, and what is left of them."""

from __future__ import annotations

from collections import Counter

from shoal.checkpoint.loader import LoaderState, merge, split
from shoal.corpora.mixture import MixtureLoader

END = 0
# Every document has a token of its own, as often as it is long.
SOURCES = {
    "prose": [[1000 + number] * (1 + number % 7) for number in range(40)],
    "code": [[2000 + number] * (3 + number % 5) for number in range(23)],
}
WEIGHTS = {"prose": 3.0, "code": 1.0}


def loader(rank: int = 0, world: int = 1, **options: int) -> MixtureLoader:
    return MixtureLoader(
        SOURCES,
        WEIGHTS,
        **{"seq_len": 15, "batch": 2, "seed": 5, "end": END, **options},
        rank=rank,
        world=world,
    )


def tokens_left(states: list[LoaderState]) -> Counter[int]:
    """Tokens that are left of the epochs that were begun."""
    numbers: Counter[int] = Counter()
    for state in states:
        for one in state.own:
            for tokens in (*one.packing, *one.ready):
                numbers.update(tokens)
    whole = split(merge(states), 1)[0]  # readers that lag behind have begun as many epochs
    some = loader()
    some.load_state(whole)
    for reader in whole.own:
        for source, spans in reader.spans.items():
            for span in spans:
                for at in span:
                    numbers.update(some.document(source, span.epoch, at))
    return numbers


def everything(states: list[LoaderState]) -> Counter[int]:
    numbers: Counter[int] = Counter()
    for name, documents in SOURCES.items():
        epochs = max(reader.epochs[name] for state in states for reader in state.own)
        for document in documents:
            for token in (*document, END):
                numbers[token] += epochs
    return numbers
