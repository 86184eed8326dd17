"""Tokens to text and back, as a server needs it: in pieces, and never half a character.

A character may be spread over tokens, and so may a stop string. What could still become one
of them is held back until it is decided; everything else leaves at once, so the pieces of a
stream together are the text that a whole answer has.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core.errors import ModelError
from shoal.core.folder import read_json
from shoal.corpora.tokenizer import check_vocab, load, locate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

READ_WHOLE = 2**18
"""Characters that are tokenised in any case, in some 100 ms: how long a prompt is, is said."""


def _byte_of_character() -> dict[str, int]:
    """The characters that byte-level tokenizers write for the 256 bytes (GPT-2, 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(rest)})
    return table


_BYTES = _byte_of_character()


class Detokenizer(Protocol):
    """Text of one stream of tokens."""

    def feed(self, token: int) -> str:
        """The text that is certain now and was not before."""

    def finish(self) -> str:
        """What was held back; half a character becomes U+FFFD."""


class _ByteLevel:
    """Detokenizer where every token is a run of bytes."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._model.special_ids:
            return ""
        return self._decoder.decode(self._model.token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Windowed:
    """Detokenizer for every other tokenizer: decode a short window twice and compare.

    The text of a token may depend on the one before it (a leading space), so the window
    begins one piece earlier than what is new.
    """

    # Four bytes make a character; a tokenizer may give each its own token. What is longer
    # and still incomplete will never be a character.
    _MOST_HELD = 8

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._window: list[int] = []
        self._shown = 0

    def feed(self, token: int) -> str:
        if token in self._special_ids:
            return ""
        self._window.append(token)
        before, after = self._texts()
        held = len(self._window) - self._shown
        undecided = after.endswith("\ufffd") or len(after) <= len(before)
        if undecided and held < self._MOST_HELD:
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._texts()
        self._shown = len(self._window)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        return decode(self._window[: self._shown]), decode(self._window)


class StopStrings:
    """Ends a text before the first stop string in it.

    The string that is complete first counts; of several that end together the longest.

    Args:
        stops: strings that end the text; none may be empty.
        keep: the text ends behind the string.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._held = ""
        self._longest = max(map(len, self._stops), default=0)
        self.matched = False

    def feed(self, piece: str) -> str:
        """The text that can leave; nothing more once :attr:`found` is true."""
        if self.matched or not piece:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        best: tuple[int, int] | None = None  # (end, start) of the string that counts
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        if best is not None:
            self.matched = True
            self._held = ""
            return text[: best[0] if self._keep else best[1]]
        keep = self._begun(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, since nothing follows."""
        rest, self._held = self._held, ""
        return rest

    def _begun(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextModel:
    """The tokenizer of a model directory, and what its tokens mean.

    Args:
        directory: a Hugging Face model directory with a ``tokenizer.json``.
    """

    def __init__(self, directory: Path) -> None:
        if not locate(directory).is_file():
            raise ModelError(
                f"{directory}: no tokenizer.json, so no text can be read or written; save the "
                "tokenizer of the model there in the format of Hugging Face tokenizers"
            )
        self.directory = directory
        self._tokenizer = load(directory)
        # A served prompt may spell special tokens, as chat templates do.
        self._tokenizer.encode_special_tokens = False
        raw = json.loads(self._tokenizer.to_str())
        self._byte_level = _is_byte_level(raw.get("decoder"))
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def check(self, vocab_size: int) -> None:
        """Every token of the tokenizer has a row in the model.

        Raises:
            ConfigError: it has more; names both numbers.
        """
        check_vocab(self._tokenizer, vocab_size, str(self.directory))

    @functools.cached_property
    def longest(self) -> int:
        """Characters of the longest token; no less than 16, for names are not their texts."""
        return max(16, *map(len, self._tokenizer.get_vocab()))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text.

        Args:
            text: any text.
            special: add what the tokenizer puts around a text, such as its first token.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def encode_within(
        self, text: str, limit: int, *, special: bool = True
    ) -> tuple[list[int], int]:
        """Tokens of a text, or the first of them when there are clearly more than ``limit``.

        A text far too long is not tokenised to its end: the tokens of its beginning are
        those of the whole, but for the last word.

        Returns:
            The tokens, and how many the whole text has; estimated from its beginning where these
            are not all of them.
        """
        beginning = max(8 * limit + 1024, READ_WHOLE // 2)
        while len(text) > 2 * beginning:
            ids = self.encode(text[:beginning], special=special)
            if len(ids) > limit + 64:
                return ids, round(len(ids) * len(text) / beginning)
            beginning *= 2
        ids = self.encode(text, special=special)
        return ids, len(ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The whole text of tokens, in the same words as :meth:`stream` gives."""
        stream = self.stream()
        return "".join([*map(stream.feed, tokens), stream.finish()])

    def stream(self) -> Detokenizer:
        """A detokenizer for one stream of tokens."""
        if self._byte_level:
            return _ByteLevel(self)
        return _Windowed(self._tokenizer, self.special_ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; those of its name if it is special.

        Ids of the model without a token in the tokenizer have no bytes.
        """
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self.special_ids:
            return name.encode()
        if self._byte_level:
            if all(character in _BYTES for character in name):
                return bytes(_BYTES[character] for character in name)
            return name.encode()  # an added token, spelled as it is
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace("\u2581", " ").encode()

    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer, by ``generation_config.json``; empty if it names none.

        Raises:
            ModelError: the file is not what it should be.
        """
        path = self.directory / "generation_config.json"
        if not path.is_file():
            return frozenset()
        named: Any = read_json(path).get("eos_token_id")
        if named is None:
            return frozenset()
        ids = named if isinstance(named, list) else [named]
        if not all(isinstance(item, int) and item >= 0 for item in ids):
            raise ModelError(
                f"{path}: eos_token_id = {named!r}: expected a token id or a list of them"
            )
        return frozenset(ids)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        inner = decoder.get("decoders")
        return isinstance(inner, list) and len(inner) == 1 and _is_byte_level(inner[0])
    return decoder.get("type") == "ByteLevel"
