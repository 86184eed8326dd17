"""Texts that clients own: what the packages that are installed here say of themselves."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Lt

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.learn.protocols import Examples

# Values of a byte.
_BYTES = 256


@part
class PackageTexts:
    """The descriptions of installed Python packages; each package owns its own text.

    Args:
        packages: those with the longest descriptions.
        seq_len: tokens of an example, T.
        tokenizer: a ``tokenizer.json``, or the directory of a model that has one; by default a
            token is a byte.
        most: tokens of a package at most; 0 for all.
        test: share of the examples that the server tests on.
    """

    packages: Annotated[int, Ge(1)] = 20
    seq_len: Annotated[int, Ge(2)] = 64
    tokenizer: str = ""
    most: Annotated[int, Ge(0)] = 0
    test: Annotated[float, Gt(0), Lt(1)] = 0.1

    def load(self, seed: int) -> tuple[Examples, Examples]:
        """Tokens int64 [N, T], and those that follow each.

        Raises:
            DataError: fewer packages have a text of this length.
        """
        found = _descriptions()[: self.packages]
        if len(found) < self.packages:
            raise DataError(
                f"data text: packages = {self.packages}; {len(found)} installed packages have a "
                "description: take at most so many"
            )
        tokens, classes = self._tokens([text for _, text in found])
        x, y, owner = [], [], []
        for at, one in enumerate(tokens):
            one = one[: self.most or None]
            count = (len(one) - 1) // self.seq_len
            if not count:
                raise DataError(
                    f"data text: {found[at][0]} has {len(one)} tokens, fewer than seq_len + 1 = "
                    f"{self.seq_len + 1}; take fewer packages or shorter sequences"
                )
            cut = count * self.seq_len
            x.append(one[:cut].reshape(count, self.seq_len))
            y.append(one[1 : cut + 1].reshape(count, self.seq_len))
            owner.append(np.full(count, at))
        whole = Examples(
            x=np.concatenate(x), y=np.concatenate(y), classes=classes, owner=np.concatenate(owner)
        )
        return _each_held_out(whole, self.test, seed)

    def _tokens(self, texts: list[str]) -> tuple[list[np.ndarray], int]:
        """Tokens of each text, and how many there can be."""
        if not self.tokenizer:
            return [
                np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts
            ], _BYTES
        from shoal.corpora.tokenizer import load

        tokenizer = load(Path(self.tokenizer))
        encoded = [one.ids for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
        return [np.array(ids, np.int64) for ids in encoded], max(
            tokenizer.get_vocab(with_added_tokens=True).values()
        ) + 1


def _each_held_out(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """A random share of every owner's examples, at least one where it has two; and the others."""
    draw = generator(seed, purpose="held-out examples")
    taken = np.zeros(len(examples), bool)
    for owner in range(int(examples.owner.max()) + 1):
        rows = draw.permutation(np.flatnonzero(examples.owner == owner))
        taken[rows[: min(len(rows) - 1, max(1, round(share * len(rows))))]] = True
    return examples.rows(np.flatnonzero(~taken)), examples.rows(np.flatnonzero(taken))


@functools.cache
def _descriptions() -> tuple[tuple[str, str], ...]:
    """(name, text) of packages, the longest text first."""
    texts: dict[str, str] = {}
    for one in metadata.distributions():
        name, text = one.metadata["Name"], one.metadata.json.get("description")
        if name and isinstance(text, str) and text.strip():
            texts.setdefault(name.lower(), text.strip())
    return tuple(sorted(texts.items(), key=lambda pair: (-len(pair[1]), pair[0])))
