from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, DataError, UnknownPartError
from shoal.corpora import PACKINGS
from shoal.corpora.heldout import check
from shoal.corpora.order import batch, check_split
from shoal.corpora.tokens import TokenSet

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@SHARED
@given(
    packing=st.sampled_from(list(PACKINGS)),
    step=st.integers(0, 10**9),
    seed=st.integers(0, 2**40),
    seq_len=st.integers(1, 70),
)
def test_any_number_of_ranks_shares_one_batch(
    small: TokenSet, packing: str, step: int, seed: int, seq_len: int
) -> None:
    whole = batch(small.train, packing, seq_len=seq_len, global_batch=8, seed=seed, step=step)
    assert whole.tokens.shape == (8, seq_len + 1) and whole.tokens.dtype == np.int64
    for world in (2, 4):
        parts = [
            batch(
                small.train, packing, seq_len=seq_len, global_batch=8, seed=seed, step=step,
                rank=rank, world=world,
            )
            for rank in range(world)
        ]  # fmt: skip
        assert (np.concatenate([p.tokens for p in parts]) == whole.tokens).all()
        if whole.documents is None:
            assert all(p.documents is None for p in parts)
        else:
            assert whole.documents.dtype == np.int32
            ids = np.concatenate([p.documents for p in parts if p.documents is not None])
            assert (ids == whole.documents).all()


# The others hold whole documents, and what is longer than a window is cut off.
@pytest.mark.parametrize("packing", ["stream", "document"])
def test_an_epoch_reads_every_window_once(small: TokenSet, packing: str) -> None:
    split, seq_len = small.train, 16
    windows = check_split(split, packing, seq_len=seq_len, global_batch=1)
    for epoch in (0, 1, 5):
        rows = [
            batch(split, packing, seq_len=seq_len, global_batch=1, seed=3, step=step).tokens[0]
            for step in range(epoch * windows, (epoch + 1) * windows)
        ]
        # All targets together are the whole ring but for less than one window.
        extra = split.num_documents if packing == "document" else 0
        total = np.bincount(_everything(split), minlength=small.vocab_size)
        total[small.end_of_text] += extra
        seen = np.bincount(np.concatenate([row[1:] for row in rows]), minlength=small.vocab_size)
        assert (seen <= total).all()
        assert 0 < total.sum() - seen.sum() <= seq_len


def _everything(split: object) -> np.ndarray:
    count = split.num_documents  # type: ignore[attr-defined]
    return np.concatenate([split.document(n) for n in range(count)])  # type: ignore[attr-defined]


def test_windows_are_the_text_and_epochs_cut_elsewhere(small: TokenSet) -> None:
    ring = _everything(small.train)
    text = np.concatenate([ring, ring]).astype("<u2").tobytes()
    windows = check_split(small.train, "stream", seq_len=24, global_batch=1)
    seen = []
    for epoch in (0, 1):
        results = [
            batch(small.train, "stream", seq_len=24, global_batch=4, seed=0, step=step)
            for step in range(epoch * windows // 4, epoch * windows // 4 + 10)
        ]
        rows = np.concatenate([b.tokens for b in results])
        assert all(row.astype("<u2").tobytes() in text for row in rows)
        seen.append({row.tobytes() for row in rows})
    assert not seen[0] & seen[1]
    other = batch(small.train, "stream", seq_len=24, global_batch=4, seed=1, step=0).tokens
    assert {row.tobytes() for row in other} != seen[0]


def test_a_batch_may_straddle_epochs(small: TokenSet) -> None:
    windows = check_split(small.train, "document", seq_len=16, global_batch=8)
    step = windows // 8  # holds the last windows of epoch 0, unless they divide evenly
    whole = batch(small.train, "document", seq_len=16, global_batch=8, seed=0, step=step)
    single = [
        batch(small.train, "document", seq_len=16, global_batch=1, seed=0, step=8 * step + row)
        for row in range(8)
    ]
    assert (whole.tokens == np.concatenate([b.tokens for b in single])).all()


def test_document_ids_follow_the_documents(small: TokenSet) -> None:
    split, end = small.train, small.end_of_text
    documents = {
        bytes(np.array([end, *split.document(n)], dtype="<u2").tobytes())
        for n in range(split.num_documents)
    }
    complete = 0
    for step in range(40):
        result = batch(split, "document", seq_len=60, global_batch=4, seed=0, step=step)
        assert result.documents is not None
        for tokens, ids in zip(result.tokens, result.documents, strict=True):
            assert ids[0] == 0 and set(np.diff(ids)) <= {0, 1}
            for number in range(1, ids[-1]):  # neither cut at the start nor at the end
                piece = tokens[ids == number]
                assert piece[0] == end and piece[-1] == end
                assert piece.astype("<u2").tobytes() in documents
                complete += 1
            # An end of text stands nowhere else than at the borders of a document.
            inner = (ids[1:-1] == ids[:-2]) & (ids[1:-1] == ids[2:])
            assert end not in tokens[1:-1][inner]
    assert complete > 50


def test_a_corpus_shorter_than_one_batch(small: TokenSet) -> None:
    with pytest.raises(
        DataError, match=r"train split has [\d,]+ tokens, and one batch of 64 x 256 needs 16,385"
    ):
        batch(small.train, "stream", seq_len=256, global_batch=64, seed=0, step=0)
    with pytest.raises(DataError, match="give more text, or lower global_batch or seq_len"):
        check(small, PACKINGS.build("document"), seq_len=256, global_batch=64)
    check(small, PACKINGS.build("stream"), seq_len=16, global_batch=4)


def test_calls_that_cannot_be(small: TokenSet) -> None:
    for kind in ({"world": 3}, {"world": 2, "rank": 2}, {"step": -1}):
        arguments = {"step": 0, **kind}
        with pytest.raises(ConfigError):
            batch(small.train, "stream", seq_len=4, global_batch=4, seed=0, **arguments)
    with pytest.raises(UnknownPartError, match=r"packing = 'strem'.*did you mean 'stream'"):
        batch(small.train, "strem", seq_len=4, global_batch=4, seed=0, step=0)
