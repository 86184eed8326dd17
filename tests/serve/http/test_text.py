"""Pieces of text: together they are the whole, and none is half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ModelError
from shoal.serve.text.pieces import StopStrings, TextModel

TEXTS = ["the cat and the dog", "grüße an alle", "🐟 fish 🐠", "日本語", "a b  c\n\td"] * 3


def byte_level():
    from shoal.corpora.tokenizer import train

    return train(TEXTS, 320)


def byte_fallback():
    """What SentencePiece models become: a metaspace, and single bytes for what is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdeghilnot", "\u2581t", "he", "\u2581the"]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he")]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


MODELS = {}


def model_of(kind, folder):
    if kind not in MODELS:
        directory = folder.mktemp(kind)
        tokenizer = byte_level() if kind == "byte_level" else byte_fallback()
        tokenizer.save(str(directory / "tokenizer.json"))
        MODELS[kind] = (TextModel(directory), tokenizer)
    return MODELS[kind]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def both(request, tmp_path_factory):
    return model_of(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    return model_of("byte_level", tmp_path_factory)


def streamed(model, tokens):
    stream = model.stream()
    return [*map(stream.feed, tokens), stream.finish()]


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40))
def test_a_text_comes_back(both, text):
    model, tokenizer = both
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    pieces = streamed(model, tokens)
    whole = tokenizer.decode(tokens)
    assert "".join(pieces) == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 319), max_size=40))
def test_any_tokens_of_a_byte_level_tokenizer(bytewise, tokens):
    model, tokenizer = bytewise
    assert "".join(streamed(model, tokens)) == tokenizer.decode(tokens)


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(0, 275), max_size=40))
def test_nothing_is_held_for_long(both, tokens):
    model, _ = both
    stream = model.stream()
    silent = 0
    for token in tokens:
        if token in model.special_ids or not model.token_bytes(token):
            continue
        silent = 0 if stream.feed(token) else silent + 1
        assert silent <= 8


def test_unknown_and_special_tokens_have_no_text(bytewise):
    model, _ = bytewise
    assert "".join(streamed(model, [0, 5, 100_000, 0])) == "".join(streamed(model, [5]))
    assert model.token_bytes(0) == b"<|endoftext|>"
    assert model.token_bytes(100_000) == b""


def test_special_tokens_of_a_prompt_count(bytewise):
    model, _ = bytewise
    assert model.encode("<|endoftext|>") == [0]


def test_a_text_far_too_long_is_not_read_to_its_end(bytewise, monkeypatch):
    model, _ = bytewise
    seen = []
    real = model.encode
    monkeypatch.setattr(model, "encode", lambda t, **o: seen.append(len(t)) or real(t, **o))
    assert len(model.encode_within("x" * 10**6, 100)[0]) > 100
    assert max(seen) < 10**6 / 4
    text = "x" * 90
    assert model.encode_within(text, 100) == (real(text), len(real(text)))


def test_bytes_of_a_fallback_token(tmp_path_factory):
    model, tokenizer = model_of("byte_fallback", tmp_path_factory)
    assert model.token_bytes(tokenizer.token_to_id("<0xE2>")) == b"\xe2"
    assert model.token_bytes(tokenizer.token_to_id("\u2581the")) == b" the"


def test_no_tokenizer(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        TextModel(tmp_path)


def test_end_tokens_of_the_generation_config(bytewise, tmp_path):
    _, tokenizer = bytewise
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = TextModel(tmp_path)
    assert model.eos_ids() == frozenset()
    path = tmp_path / "generation_config.json"
    for text, ids in (
        ("{}", ()),
        ('{"eos_token_id": 3}', (3,)),
        ('{"eos_token_id": [3, 4]}', (3, 4)),
    ):
        path.write_text(text)
        assert model.eos_ids() == frozenset(ids)
    for text in ("[]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": -1}'):
        path.write_text(text)
        with pytest.raises(ModelError, match="generation_config"):
            model.eos_ids()


def first_stop(text, stops):
    """The definition: the string that is complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
)
def test_stop_strings_are_found_wherever_the_pieces_break(pieces, stops):
    watch = StopStrings(stops)
    out = "".join(watch.feed(piece) for piece in pieces)
    result = watch.matched
    out += watch.finish()
    assert (out, result) == first_stop("".join(pieces), stops)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=20), stop=st.text("ab", min_size=1, max_size=4))
def test_only_what_may_become_a_stop_is_held(text, stop):
    watch = StopStrings([stop])
    sent = 0
    for place, character in enumerate(text, 1):
        sent += len(watch.feed(character))
        if watch.matched:
            return
        held = text[sent:place]
        assert len(held) < len(stop)
        assert stop.startswith(held)


def test_the_longest_token_is_known(tmp_path):
    tokenizer = byte_level()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = tokenizer.get_vocab()
    assert TextModel(tmp_path).longest == max(16, *map(len, names))
