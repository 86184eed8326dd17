"""Generated problems and their checkers, and a window for each document."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError
from shoal.corpora import CORPORA, PACKINGS
from shoal.corpora.tasks import NAMES, is_right, problem


def test_answers_are_right_and_others_are_not():
    for number in range(60):
        one = problem("train", number)
        assert one.task == NAMES[number % 3]
        assert is_right(one.prompt, one.answer)
        for wrong in ("", one.answer[:-1], one.answer[1:], one.answer + "0", f"{one.answer} x"):
            assert not is_right(one.prompt, wrong)
        other = problem("heldout", number)
        assert other.prompt != one.prompt
        assert not is_right(one.prompt, other.answer)


def test_checkers_do_not_trust_the_generator():
    assert is_right("s 3120=", "0123")
    assert not is_right("s 3120=", "0132")
    assert is_right("s 31 20=", "13 02")
    assert not is_right("s 31 20=", "01 23")
    assert is_right("a 099 012+001 034=", "100 046")
    assert not is_right("a 099 012+001 034=", "100 46")
    assert not is_right("a 099 012+001 034=", "046 100")
    assert is_right("a 9999+0001=", "10000")
    assert is_right("a 01200+00034=", "01234")
    assert not is_right("a 9999+0001=", "09990")
    assert not is_right("a 01200+00034=", "1234")
    assert is_right("j name:abcd city:efgh=", '{"city": "efgh", "name": "abcd"}')
    assert not is_right("j name:abcd=", '{"name":"abce"}')
    assert not is_right("j name:abcd=", '["abcd"]')


def test_the_corpus_is_that_of_its_seed():
    first = CORPORA.build({"name": "tasks", "problems": 9, "heldout": 3})
    documents = list(first.documents())
    assert [one.split for one in documents] == ["train"] * 9 + ["heldout"] * 3
    assert list(first.documents("heldout")) == documents[9:]
    assert documents[0].text == "".join(problem("train", 0)[1:])
    other = CORPORA.build({"name": "tasks", "problems": 9, "heldout": 3, "seed": 1})
    assert other.fingerprint() != first.fingerprint()
    assert not {one.text for one in documents} & {one.text for one in other.documents()}
    for bad in ({"problems": 0}, {"heldout": 0}, {"seed": -1}):
        with pytest.raises(ConfigError, match=r"corpus\.tasks"):
            CORPORA.build({"name": "tasks", **bad})


def test_a_window_is_a_document(tmp_path):
    pytest.importorskip("tokenizers")
    import numpy as np

    from shoal.corpora.tokens import prepare

    tokens = prepare({"name": "tasks", "problems": 6, "heldout": 3}, vocab_size=257, cache=tmp_path)
    padded = PACKINGS.build("padded")
    assert padded.num_windows(tokens.train, 90) == 6
    result, documents = padded.fill(tokens.train, np.array([2, 0]), seq_len=90, seed=0, epoch=0)
    assert documents is None
    assert result.shape == (2, 91)
    for row, number in zip(result, (2, 0), strict=True):
        whole = tokens.train.document(number)
        assert row[: len(whole)].tolist() == whole.tolist()
        assert set(row[len(whole) :].tolist()) <= {tokens.end_of_text}
    short, _ = padded.fill(tokens.train, np.array([1]), seq_len=9, seed=0, epoch=0)
    assert short[0].tolist() == tokens.train.document(1)[:10].tolist()
