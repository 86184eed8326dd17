"""The tokenizer: byte-level BPE learned from the corpus, or a ``tokenizer.json`` of the user.

A learned tokenizer knows all 256 bytes, so every text has tokens and decodes to itself.
Id 0 is ``<|endoftext|>``; text that spells it stays text.

Source: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units,
2016; bytes as the alphabet: Radford et al. (GPT-2), 2019.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError, MissingExtraError, require
from shoal.core.files import expanded

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"

# Text the vocabulary is learned from; more does not change the first merges.
SAMPLE_BYTES = 8 * 10**6
MIN_VOCAB = 257
MAX_VOCAB = 2**20
MAX_FILE_BYTES = 64 * 2**20

# Words with the space before them, a line end with the next line's indent, other
# blanks, and runs of signs: a merge never crosses these borders. Keeping indents
# whole suits source code; single spaces before words suit prose.
_WORDS = r" ?\w+|\n[ \t]*|[ \t]+|[^\s\w]+"

# What other tokenizers call the end of a text, in the order they are tried.
_ENDS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "[SEP]",
)


def sample(texts: Iterable[str], total_bytes: int, limit: int = SAMPLE_BYTES) -> Iterator[str]:
    """Texts of at most ``limit`` bytes together, evenly spread over the corpus.

    A text is kept when the kept share has fallen behind; very long ones are clipped.

    Args:
        texts: the training split.
        total_bytes: size of the corpus, held-out part included.
        limit: bytes to keep.
    """
    share = min(1.0, limit / max(1, total_bytes))
    longest = max(1, limit // 8)
    seen = kept = 0
    for text in texts:
        clipped = text[:longest] if share < 1 else text
        size = len(clipped.encode())
        seen += size
        if kept + size / 2 <= share * seen and kept + size <= limit:
            kept += size
            yield clipped


def train(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Learn a byte-level BPE; the same texts give the same tokenizer.

    Args:
        texts: what to learn from.
        vocab_size: entries at most; a small corpus has fewer pairs to merge.
        special: tokens with a meaning of their own, behind that which ends a text.

    Raises:
        ConfigError: ``vocab_size`` cannot hold all bytes, or is beyond any model.
        MissingExtraError: the package tokenizers is not installed.
    """
    least = MIN_VOCAB + len(special)
    require(
        least <= vocab_size <= MAX_VOCAB,
        "vocab_size",
        vocab_size,
        expected=f"{least} (all bytes and {', '.join((END_OF_TEXT, *special))}) to {MAX_VOCAB}",
        hint="choose a model with such a vocabulary or give a tokenizer.json",
    )
    _require_package()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``, given itself or by its directory.

    Truncation and padding that the file asks for are turned off.

    Raises:
        ConfigError: the file is missing, too large or no tokenizer; names the file.
        MissingExtraError: the package tokenizers is not installed.
    """
    file = locate(path)
    _require_package()
    from tokenizers import Tokenizer

    try:
        size = file.stat().st_size
        text = file.read_bytes() if size <= MAX_FILE_BYTES else b""
    except OSError as cause:
        raise ConfigError(
            f"tokenizer = {str(path)!r}: cannot be read ({cause.strerror}); give the path of a "
            "tokenizer.json, or bpe to train one on the corpus"
        ) from cause
    require(
        size <= MAX_FILE_BYTES,
        f"tokenizer {file}: size",
        size,
        expected=f"at most {MAX_FILE_BYTES} bytes",
    )
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as cause:
        raise ConfigError(
            f"tokenizer {file}: not JSON ({cause}); give a tokenizer.json of Hugging Face"
        ) from cause
    if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
        raise ConfigError(
            f"tokenizer {file}: it has no 'model'; give a tokenizer.json of Hugging Face"
        )
    try:
        tokenizer = Tokenizer.from_str(text.decode())
    except Exception as cause:  # the library raises nothing more precise
        raise ConfigError(
            f"tokenizer {file}: cannot be used ({cause}); "
            "write it again with a current version of tokenizers"
        ) from cause
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def locate(path: Path) -> Path:
    """The ``tokenizer.json`` itself, for a file or a model directory."""
    path = expanded(path)
    return path / "tokenizer.json" if path.is_dir() else path


def check_vocab(tokenizer: Tokenizer, vocab_size: int, where: str) -> int:
    """The number of ids of a tokenizer, when a model with ``vocab_size`` rows can embed them.

    Raises:
        ConfigError: the tokenizer has ids that the model lacks; names both.
    """
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    require(
        0 <= highest < vocab_size,
        f"tokenizer {where}: vocabulary",
        highest + 1,
        expected=f"at most the model's vocab_size = {vocab_size}",
        hint="choose a model with a larger vocabulary, or tokenizer: bpe to train one that fits",
    )
    return highest + 1


def end_of_text(tokenizer: Tokenizer, path: Path | None = None) -> int:
    """The id that ends a text.

    Args:
        tokenizer: whose id.
        path: its file; ``eos_token`` of a ``tokenizer_config.json`` beside it counts first.

    Raises:
        ConfigError: none of the usual names is in the vocabulary.
    """
    names = list(_ENDS)
    beside = locate(path).with_name("tokenizer_config.json") if path else None
    if beside is not None and beside.is_file() and beside.stat().st_size <= MAX_FILE_BYTES:
        try:
            named = json.loads(beside.read_bytes()).get("eos_token")
        except (OSError, ValueError, AttributeError, RecursionError) as cause:
            raise ConfigError(f"{beside}: not a JSON object ({cause}); repair or remove it") from (
                cause
            )
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str):
            names.insert(0, named)
    for name in names:
        result = tokenizer.token_to_id(name)
        if result is not None:
            return int(result)
    raise ConfigError(
        f"tokenizer {path or ''}: it has no end-of-text token; add one of {', '.join(_ENDS)}"
    )


def _require_package() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise MissingExtraError("tokenizers", "run", "tokenising text") from None
