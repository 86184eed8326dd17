"""Answers of a given form: JSON of a schema, a regular expression, a choice, calls of functions.

A *form* is a small JSON object with one of these names:

=========== ====================================================================
``json``    a JSON schema; the answer is a JSON document of it
``regex``   the answer matches it from its first to its last character
``choice``  a list of texts; the answer is one of them
``tools``   ``functions`` (name and parameters of each) and ``many``: calls of them
=========== ====================================================================

It becomes a grammar for ``llguidance``, which knows after each token which ones may come
next. Every size that a grammar could grow to has a limit, so a grammar that is accepted costs
a step of the engine some milliseconds at most.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from shoal.core.errors import ServeError, ShoalError
from shoal.core.extras import import_extra
from shoal.ir import Request, ServeJob
from shoal.serve.engine.hooks import EngineHook
from shoal.serve.text.calls import CALL_BEGIN, CALL_END

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from torch import Tensor

    from shoal.serve.engine.build import EngineBuilder

GRAMMAR = "its grammar"
"""The first words of why a request whose grammar cannot be followed is refused."""

# What lies between the signs of JSON: nothing, a blank, or a new line with its indent. With no
# limit an undecided model would write blanks for ever.
_BLANKS = r"( |\n {0,16})?"
# A union of which one member matches is what `oneOf` is nearly always meant as.
_OPTIONS = {"whitespace_pattern": _BLANKS, "coerce_one_of": True}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_COMPILED = 64


class GrammarError(ServeError):
    """A form that is no form, or that is beyond the limits."""


def _library() -> Any:
    return import_extra("llguidance", extra="run", purpose="answers of a given form")


def _limits() -> LLParserLimits:
    # Speeds by the library: 50k of fuel a ms while compiling, 14k in a step; 20k items a ms;
    # 2 kB a lexer state.
    limits: LLParserLimits = _library().LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    return limits


def grammar_of(form: Mapping[str, Any]) -> str:
    """The grammar of a form, not compiled yet.

    Raises:
        GrammarError: it is no form.
    """
    library = _library().LLMatcher
    ((kind, value),) = form.items()
    if kind == "json":
        grammar: str = library.grammar_from_json_schema(json.dumps(value), overrides=_OPTIONS)
    elif kind == "regex":
        grammar = library.grammar_from_regex(value)
    elif kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        grammar = library.grammar_from_lark(f"start: {texts}")
    elif kind == "tools":
        grammar = library.grammar_from_lark(_calls(value))
    else:
        raise GrammarError(f"form = {kind!r}: expected json, regex, choice or tools")
    return grammar


def _calls(value: Mapping[str, Any]) -> str:
    """Lark of one call, or of several below each other."""
    names = [function["name"] for function in value["functions"]]
    for name in names:
        if not _NAME.fullmatch(name):
            raise GrammarError(f"tool name = {name[:80]!r}: expected letters, digits, _, - and .")
    rules = ['start: call ("\\n" call)*' if value["many"] else "start: call"]
    some = " | ".join(f"call_{place}" for place in range(len(names)))
    rules.append(f'call: "{CALL_BEGIN}\\n" ({some}) "\\n{CALL_END}"')
    for place, function in enumerate(value["functions"]):
        head = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
        schema = {**function["parameters"], "x-guidance": _OPTIONS}
        rules.append(f'call_{place}: {head} arguments_{place} "}}"')
        rules.append(f"arguments_{place}: %json {json.dumps(schema)}")
    return "\n".join(rules)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Args:
        tokens: the bytes of each; empty where a row of the model stands for nothing.
        special: ids that are no text.
        encode: tokens of a text, as the model was trained to see it.
    """

    tokens: Sequence[bytes]
    special: Sequence[int] = ()
    encode: Callable[[str], Sequence[int]] = lambda text: ()


class _Wrapper:
    """A vocabulary as the library wants it, with one more token that stands for the end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary.encode
        self.tokens = [*vocabulary.tokens, b"<end of the answer>"]
        self.eos_token_id = len(vocabulary.tokens)
        self.special_token_ids = [*vocabulary.special, self.eos_token_id]
        hidden = set(self.special_token_ids)
        self._ids = {raw: i for i, raw in enumerate(self.tokens) if raw and i not in hidden}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that a grammar leaves no choice about."""
        raw = text.encode() if isinstance(text, str) else text
        result = list(self._encode(raw.decode(errors="replace")))
        # Some tokenizers put a blank before a text, or know no single bytes.
        if b"".join(self.tokens[token] for token in result) == raw:
            return result
        result, start = [], 0
        while start < len(raw):
            ends = range(min(len(raw), start + self._longest), start, -1)
            end = next((end for end in ends if raw[start:end] in self._ids), None)
            if end is None:
                return result  # the model cannot spell the rest
            result.append(self._ids[raw[start:end]])
            start = end
        return result


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    wrapper = _Wrapper(vocabulary)
    end = wrapper.eos_token_id
    tokenizer: LLTokenizer = _library().LLTokenizer(
        wrapper, n_vocab=len(wrapper.tokens), eos_token=end
    )
    return tokenizer


def trial(form: Mapping[str, Any]) -> str:
    """The grammar of a form, compiled and tested with a first token.

    Raises:
        GrammarError: what is wrong with it.
    """
    grammar = grammar_of(form)
    matcher = _library().LLMatcher(_bytes(), grammar, limits=_limits(), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(matcher.get_error().partition("\n\n")[0][:400])
    return grammar


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    return _tokenizer(Vocabulary([bytes([byte]) for byte in range(256)]))


class _Matching:
    """Where a request is in its grammar."""

    def __init__(self, request: Request, matcher: LLMatcher) -> None:
        self.request = request
        self.matcher = matcher
        self._fed = request.n_prompt

    def advance(self) -> None:
        tokens = self.request.tokens
        if len(tokens) > self._fed:
            self.matcher.consume_tokens(tokens[self._fed :])
            self._fed = len(tokens)


def _no_vocabulary() -> Vocabulary:
    raise ServeError("this engine has no tokenizer; leave the form of the answer out")


class Grammars(EngineHook):
    """Which tokens may come next, for requests with a grammar.

    Args:
        vocabulary: called with the first grammar, because most servers never use one.
    """

    kind: ClassVar[str] = "grammar"

    def __init__(self, vocabulary: Callable[[], Vocabulary] = _no_vocabulary) -> None:
        from shoal.serve.engine.adjust import RequestHistory

        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=_COMPILED)(self._compile)
        self._matchings: RequestHistory[_Matching] = RequestHistory(
            lambda request: _Matching(request, self._compiled(_grammar(request)).deep_copy())
        )

    def wanted(self, requests: Sequence[Request]) -> Sequence[int]:
        """Rows of answers that have a form."""
        return [row for row, one in enumerate(requests) if one.params.grammar is not None]

    def adjust(
        self, scores_RV: Tensor, rows: Sequence[int], requests: Sequence[Request]
    ) -> Mapping[str, str]:
        import torch

        formed = [requests[row] for row in rows]
        allowed, failed = self.allowed(formed, scores_RV.shape[-1])
        banned_RV = torch.from_numpy(~allowed).to(scores_RV.device)
        scores_RV[rows] = scores_RV[rows].masked_fill(banned_RV, float("-inf"))
        for row, request in zip(rows, formed, strict=True):
            if request.id in failed:  # whatever is chosen now is dropped
                scores_RV[row] = 0.0
        return failed

    def allowed(
        self, requests: Sequence[Request], vocab_size: int
    ) -> tuple[np.ndarray, dict[str, str]]:
        """Tokens [R, V] that may come next, true or false, and why requests cannot go on.

        Args:
            requests: each with a grammar.
            vocab_size: rows of the model's output matrix.
        """
        allowed = np.zeros((len(requests), vocab_size), dtype=bool)
        failed: dict[str, str] = {}
        for row, request in enumerate(requests):
            try:
                (matching,) = self._matchings.of([request])
            except ShoalError as cause:  # a model without a tokenizer
                failed[request.id] = f"{GRAMMAR}: {cause}"
                continue
            matching.advance()
            mask = matching.matcher.compute_bitmask()
            if matching.matcher.is_error():
                failed[request.id] = f"{GRAMMAR}: {matching.matcher.get_error()[:400]}"
                continue
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            assert self._tokenizer is not None
            end = self._tokenizer.eos_token
            allowed[row, :end] = bits[: min(end, vocab_size)]
            if bits[end]:
                allowed[row, list(request.params.stop_ids)] = True
            if not allowed[row].any():
                failed[request.id] = f"{GRAMMAR} allows no token of this model"
        return allowed, failed

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._vocabulary())
        matcher: LLMatcher = _library().LLMatcher(
            self._tokenizer, grammar, limits=_limits(), log_level=0
        )
        return matcher


def _grammar(request: Request) -> str:
    assert request.params.grammar is not None
    return request.params.grammar


def vocabulary(job: ServeJob, vocab_size: int) -> Vocabulary:
    """The tokens of a job's model.

    Raises:
        ModelError: it has no tokenizer.
    """
    from shoal.serve.text.pieces import TextModel

    text = TextModel(Path(job.model))
    return Vocabulary(
        [text.token_bytes(token) for token in range(vocab_size)],
        sorted(token for token in text.special_ids if token < vocab_size),
        lambda words: text.encode(words, special=False),
    )


def grammars_of(built: EngineBuilder) -> Grammars:
    """Of every engine: a request says whether its answer has a form."""
    # Not of ``built`` as a whole: it holds the model, whose layers may be let go of.
    job, size = built.job, built.model.config.vocab_size
    return Grammars(lambda: vocabulary(job, size))
