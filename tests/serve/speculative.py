"""A drafter for tests that knows the answers, and is wrong as often as it is told to be."""

from __future__ import annotations

import random

import numpy as np

from shoal.serve.decode.protocols import TokenTree, branches


class Knowing:
    """Random trees in which true continuations stand at random places.

    Args:
        answers: request id -> its tokens, prompt included.
        vocab_size: of wrong guesses.
        right: how often a node goes on with the truth.
        seed: of trees and errors.
    """

    needs = "nothing"

    def __init__(self, answers, vocab_size, right=0.7, seed=0):
        self.answers, self.vocab_size, self.right = answers, vocab_size, right
        self.random = random.Random(seed)
        self.seen = {}  # request id -> place -> token that was told to be certain

    def propose(self, guesses):
        return [self._tree(guess.request, guess.nodes) for guess in guesses]

    def _tree(self, request, most):
        if self.random.random() < 0.1:
            return None
        truth = self.answers[request.id][len(request.tokens) :]
        tokens, parent, depth = [request.tokens[-1]], [-1], [0]
        true = {0}
        for row in range(1, self.random.randint(1, most) + 1):
            above = self.random.choice([*range(max(0, row - 3), row), max(true)])
            fits = above in true and depth[above] < len(truth)
            if fits and self.random.random() < self.right:
                tokens.append(truth[depth[above]])
                true.add(row)
            else:
                tokens.append(self.random.randrange(self.vocab_size))
            parent.append(above)
            depth.append(depth[above] + 1)
        return TokenTree(np.array(tokens), branches(tuple(parent)))

    def observe(self, seen):
        for one in seen:
            known = self.seen.setdefault(one.request.id, {})
            for place in [place for place in known if place >= one.start]:
                del known[place]
            known.update(enumerate(one.tokens, one.start))

    def memory_bytes(self):
        return 0
