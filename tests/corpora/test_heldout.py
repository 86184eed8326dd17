from __future__ import annotations

import gzip
import lzma
import math
from pathlib import Path

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.corpora.heldout import (
    bits_per_byte,
    check,
    gzip_bits_per_byte,
    heldout_chunks,
    xz_bits_per_byte,
)
from shoal.corpora.packing.stream import StreamPacking
from shoal.corpora.tokens import TokenSet, prepare


@pytest.mark.parametrize("context", [2, 7, 32, 4096])
@pytest.mark.parametrize("stride", [None, 1, "all"])
def test_every_token_is_scored_once_with_enough_context(
    small: TokenSet, context: int, stride: int | str | None
) -> None:
    split, end = small.train, small.end_of_text
    step = context if stride == "all" else stride
    assert step is None or isinstance(step, int)
    scored: dict[int, list[int]] = {}
    batches = list(heldout_chunks(split, context=context, stride=step, batch_tokens=500))
    for tokens, mask, documents in batches:
        assert tokens.shape[0] * mask.shape[1] <= max(500, mask.shape[1])
        assert mask.shape[1] <= context
        for row, counts, document in zip(tokens, mask, documents, strict=True):
            sequence = np.array([end, *split.document(document)])
            places = np.flatnonzero(counts)
            assert (np.diff(places) == 1).all()
            length = places[-1] + 1
            # Where the window stands is not told; it ends where its scored tokens end.
            windows = np.lib.stride_tricks.sliding_window_view(sequence, length + 1)
            begins = np.flatnonzero((windows == row[: length + 1]).all(1)).tolist()
            assert begins
            begin = next(
                b for b in begins if all(b + p not in scored.get(document, ()) for p in places)
            )
            scored.setdefault(document, []).extend((begin + places).tolist())
            least = context - (step or context // 2)
            assert places[0] >= least or begin == 0
    total = sum(len(places) for places in scored.values())
    assert total == len(split)
    forward = sum(mask.size for _, mask, _ in batches)
    if stride is None and context == 32:
        assert forward < 2.2 * len(split)


def test_ranks_share_the_batches(small: TokenSet) -> None:
    whole = list(heldout_chunks(small.heldout, context=16, batch_tokens=64))
    parts = [
        list(heldout_chunks(small.heldout, context=16, batch_tokens=64, rank=r, world=3))
        for r in range(3)
    ]
    assert sum(map(len, parts)) == len(whole)
    scored = sum(b.scored.sum() for part in parts for b in part)
    assert scored == len(small.heldout)


def test_a_bounded_evaluation_is_spread_and_repeatable(small: TokenSet) -> None:
    first, again = (
        list(heldout_chunks(small.train, context=16, max_tokens=1000)) for _ in range(2)
    )
    assert all((a.tokens == b.tokens).all() for a, b in zip(first, again, strict=True))
    assert abs(sum(b.scored.sum() for b in first) - 1000) <= 16
    seen = np.concatenate([b.documents for b in first])
    assert len(set(seen)) > small.train.num_documents / 4


def test_bits_per_byte_of_a_uniform_model(small: TokenSet) -> None:
    split, vocab = small.heldout, small.vocab_size
    nll = len(split) * math.log(vocab)
    expected = len(split) * math.log2(vocab) / sum(split.bytes_per_document.tolist())
    assert bits_per_byte(nll, len(split), split) == pytest.approx(expected)
    assert bits_per_byte(nll / 2, len(split) // 2, split) == pytest.approx(expected, rel=0.01)


def test_baselines_are_the_compressors_on_each_document(small: TokenSet) -> None:
    raw = list(small.heldout_texts())
    size = sum(map(len, raw))
    by_gzip = 8 * sum(len(gzip.compress(r, 9)) for r in raw) / size
    by_xz = 8 * sum(len(lzma.compress(r, preset=9 | lzma.PRESET_EXTREME)) for r in raw) / size
    file = small.path / "baseline-gzip.json"
    assert gzip_bits_per_byte(small) == by_gzip and file.exists()
    assert xz_bits_per_byte(small) == by_xz
    file.write_text('{"bits_per_byte": 0.5}')
    assert gzip_bits_per_byte(small) == 0.5  # kept, not computed again
    file.write_text("{")
    assert gzip_bits_per_byte(small) == by_gzip


def test_nothing_held_out(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a few words"}\n' * 3)
    data = {"name": "jsonl", "path": str(tmp_path), "heldout_every": 10**9}
    tokens = prepare(data, vocab_size=300, cache=tmp_path / "c")
    assert tokens.heldout.num_documents == len(tokens.heldout) == 0
    with pytest.raises(DataError, match="set heldout_every of the corpus to a smaller number"):
        heldout_chunks(tokens.heldout, context=8)
    with pytest.raises(DataError, match="held-out split"):
        check(tokens, StreamPacking(), seq_len=4, global_batch=1)
    with pytest.raises(DataError, match="no held-out text"):
        gzip_bits_per_byte(tokens)


@pytest.mark.parametrize(
    "arguments", [{"context": 1}, {"context": 8, "stride": 9}, {"context": 8, "rank": 1}]
)
def test_lengths_that_cannot_be(small: TokenSet, arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        heldout_chunks(small.heldout, **arguments)
