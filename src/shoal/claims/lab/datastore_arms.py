"""Text of the installed packages, and small readers that have learned a tenth of it.

Files are drawn by a hash of their names until there are as many words as are wanted; a few of them
are held out, for judging and for choosing, and are never stored.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.claims.experiments.tiny import llama
from shoal.core.errors import DataError
from shoal.core.files import write_dir_atomic
from shoal.core.random import generator
from shoal.fields.retrieve.datastore.passages import TextFile

READERS = {"small": 96, "large": 192}
"""Reader -> its width; the larger has three times the parameters."""

_VOCAB, _LAYERS, _HEAD, _CONTEXT = 4096, 4, 32, 4096
# Windows of a step, and of the last steps, which have the length of a prompt with passages.
_SHORT, _LONG, _STEP_TOKENS, _LAST = 1024, 3584, 7168, 0.15
_LR, _WARM = 4e-3, 40
_LEAST, _MOST = 2_000, 200_000


@dataclass(frozen=True)
class LocalText:
    """Files of the packages.

    Args:
        stored: go into the datastore.
        learned: a tenth of them, which readers learn.
        heldout: judge.
        validation: choose.
        words: of those that are stored.
    """

    stored: tuple[TextFile, ...]
    learned: tuple[TextFile, ...]
    heldout: tuple[TextFile, ...]
    validation: tuple[TextFile, ...]
    words: int


def local_text(words: int) -> LocalText:
    """Python sources and documents of the installed packages, about so many words.

    Raises:
        DataError: there are fewer than a tenth of them.
    """
    root = Path(sysconfig.get_paths()["purelib"])
    there = [path for kind in ("py", "md", "rst", "txt") for path in root.rglob(f"*.{kind}")]
    order = sorted((_draw(path.relative_to(root)), path) for path in there)
    files: dict[str, list[TextFile]] = {"stored": [], "learned": [], "heldout": [], "valid": []}
    count = 0
    for number, path in order:
        if not _LEAST <= path.stat().st_size <= _MOST:
            continue
        file = TextFile(path.relative_to(root).as_posix(), path)
        place = number % 100
        if place < 2:
            files["heldout" if place else "valid"].append(file)
            continue
        files["stored"].append(file)
        if place % 10 == 2:
            files["learned"].append(file)
        count += len(path.read_bytes().split())
        if count >= words:
            break
    if count < words / 10:
        raise DataError(f"{root}: {count:,} words of text; expected {words:,}")
    named = {kind: tuple(sorted(some)) for kind, some in files.items()}
    return LocalText(
        named["stored"], named["learned"], named["heldout"], named["valid"], count
    )


def _draw(name: Path) -> int:
    return int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:8], "big")


def token_stream(files: Sequence[TextFile], tokenizer: Any) -> np.ndarray:
    """Tokens of files in the order of their names, int64, an end of text behind each."""
    from shoal.corpora.tokenizer import end_of_text

    end = end_of_text(tokenizer)
    texts = [file.path.read_bytes().decode("utf-8", "replace") for file in files]
    pieces = [np.array([*one.ids, end]) for one in tokenizer.encode_batch(texts)]
    return np.concatenate(pieces)


def learned_tokenizer(text: LocalText) -> Any:
    """A tokenizer of what readers learn."""
    from shoal.corpora import tokenizer

    texts = [file.path.read_bytes().decode("utf-8", "replace") for file in text.learned]
    size = sum(map(len, texts))
    return tokenizer.train(tokenizer.sample(texts, size), _VOCAB)


def make_reader(
    width: int,
    text: LocalText,
    directory: Path,
    *,
    tokens: int,
    seed: int,
    say: Callable[[float], None] = lambda done: None,
) -> float:
    """Train a reader and write it as a Hugging Face directory; its validation loss in nats.

    Args:
        width: of the model.
        text: of which it learns a tenth.
        directory: that is written.
        tokens: that it reads.
        seed: of weights and order.
        say: called with the share that is done.
    """
    import torch

    from shoal.model import huggingface
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    tokenizer = learned_tokenizer(text)
    data = torch.from_numpy(token_stream(text.learned, tokenizer))
    config = llama(
        width, _LAYERS, width // _HEAD, vocab=_VOCAB, length=_CONTEXT, tied=True,
        initializer_range=0.02,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LR, betas=(0.9, 0.95), weight_decay=0.05
    )
    steps = max(1, tokens // _STEP_TOKENS)
    for step in range(steps):
        length = _LONG if step >= (1 - _LAST) * steps else _SHORT
        draw = generator(seed, purpose="datastore reader", step=step)
        starts = draw.integers(0, len(data) - length - 1, _STEP_TOKENS // length)
        rows = torch.stack([data[at : at + length + 1] for at in starts])
        lr = _LR * min(1.0, (step + 1) / _WARM) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = lr
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss_sum(rows[:, :-1], rows[:, 1:]) / (rows.numel() - len(rows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        say((step + 1) / steps)
    with write_dir_atomic(directory) as place:
        tokenizer.save(str(place / "tokenizer.json"))
        huggingface.write(place / "model", model, place / "tokenizer.json")
    held = torch.from_numpy(token_stream(text.validation, tokenizer))
    rows = held[: len(held) // (_SHORT + 1) * (_SHORT + 1)].view(-1, _SHORT + 1)[:64]
    with torch.no_grad():
        total = sum(float(model.loss_sum(row[None, :-1], row[None, 1:])) for row in rows)
    return total / (len(rows) * _SHORT)
