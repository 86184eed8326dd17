"""Continue a text with a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from shoal.core.errors import ConfigError, ModelError


def continue_text(
    directory: Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """What the model writes after ``prompt``.

    Raises:
        ConfigError: the prompt is not UTF-8.
        ModelError: the directory has no tokenizer, or the text is too long for the model.
    """
    from shoal.corpora import tokenizer as bpe
    from shoal.model.generate import generate
    from shoal.model.huggingface import read

    model = read(directory).eval()
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{directory}: no tokenizer.json; copy the model's own beside its weights")
    tokenizer = bpe.load(file)
    ids = [bpe.end_of_text(tokenizer, file), *tokenizer.encode(_text(prompt)).ids]
    longest = model.config.max_position
    if len(ids) + tokens > longest:
        raise ModelError(
            f"--prompt has {len(ids)} tokens and --tokens is {tokens}: together more than "
            f"{longest}, the longest position of {directory}; ask for fewer"
        )
    result = generate(
        model, ids, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    return str(tokenizer.decode(result))


def _text(prompt: str) -> str:
    """The text of a command line's word: in some locales Python has kept its bytes as they were.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        return prompt.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError as cause:
        raise ConfigError(
            f"--prompt = {prompt!r}: not UTF-8 ({cause.reason} at byte {cause.start}); "
            "give the text in UTF-8"
        ) from None
