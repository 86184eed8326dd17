"""Training sees what serving sees: the same texts, the same scores."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.claims.lab.concurrent import ConcurrentText, batch_of, loss_of, scores_of  # noqa: E402
from shoal.core.errors import DataError  # noqa: E402
from shoal.serve.decode.hogwild.blocks import BlockStore  # noqa: E402
from shoal.serve.decode.hogwild.forward import Forward  # noqa: E402
from shoal.serve.decode.hogwild.views import Feed, HogwildView  # noqa: E402

TEXTS = (
    ConcurrentText([3, 60, 61, 62], ([10, 11, 12, 13], [20, 21, 22]), ([0, 1, 2, 5], [1, 3, 4])),
    ConcurrentText([3, 70], ([30, 31], [40, 41, 42, 43, 44]), ([2, 3], [0, 1, 2, 3, 9])),
    ConcurrentText([3, 80, 81], ([50], []), ([0], [])),
)


def served(model, text):
    """Scores behind each token of each worker, by the blocks of the server."""
    store = BlockStore(model, 100, longest=100, num_blocks=8)
    forward = Forward(model, store)
    prompt = store.open(None)
    own = {name: store.open(name) for name in "abc"[: len(text.tokens)]}
    forward([Feed(HogwildView((prompt,), None), text.prompt)])
    scores = {name: [] for name in own}
    for step in range(max(max(when, default=0) for when in text.steps) + 1):
        feeds = []
        for name, tokens, when in zip(own, text.tokens, text.steps, strict=True):
            if step in when:
                others = [block for other, block in own.items() if other != name]
                view = HogwildView((prompt, *others, own[name]), name)
                feeds.append(Feed(view, [tokens[when.index(step)]]))
        if feeds:
            for feed, result in zip(feeds, forward(feeds), strict=True):
                scores[feed.view.writer].append(result.clone())
    return list(scores.values())


def test_scores_are_those_of_the_server(random_model):
    model = random_model("qwen3", dtype=torch.float64)
    three = ConcurrentText([3, 4], ([5, 6], [7, 8], [9, 10, 11]), ([0, 3], [0, 1], [1, 2, 3]))
    for texts in (TEXTS, (three,)):
        batch = batch_of(texts)
        scores = scores_of(model, batch)
        for row, text in enumerate(texts):
            first = batch.widths[0]
            for width, expected in zip(batch.widths[1:], served(model, text), strict=True):
                if expected:
                    got = scores[row, first : first + len(expected)]
                    torch.testing.assert_close(got, torch.stack(expected), rtol=0, atol=1e-8)
                first += width


def test_loss_is_of_what_workers_write_next(random_model):
    model = random_model("llama", dtype=torch.float64).requires_grad_(True)
    batch = batch_of(TEXTS[:1])
    assert batch.targets.tolist() == [[-100] * 4 + [11, 12, 13, -100] + [21, 22, -100]]
    loss = loss_of(model, batch)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_bad_texts():
    with pytest.raises(DataError, match="a later step for each token"):
        batch_of([ConcurrentText([1], ([2, 3],), ([1, 1],))])
    with pytest.raises(DataError, match="2 workers"):
        batch_of([TEXTS[0], ConcurrentText([1], ([2],), ([0],))])
