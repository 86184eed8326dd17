"""Windows of held-out text: the first half is the query, only the second half is scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import require
from shoal.fields.retrieve.datastore.passages import TextFile
from shoal.fields.retrieve.datastore.protocols import DatastoreError


@dataclass(frozen=True)
class EvalWindow:
    """A piece of a held-out text.

    Args:
        tokens: int64 [window].
        query: text of the first half.
        text: of the whole window, which no passage may repeat.
    """

    tokens: np.ndarray
    query: str
    text: str


def eval_windows(
    files: Sequence[TextFile], tokenizer: Any, *, window: int, stride: int, most: int
) -> list[EvalWindow]:
    """Windows of whole length, evenly spread over all of them.

    Args:
        files: held-out texts.
        tokenizer: of the readers.
        window: tokens.
        stride: tokens from the beginning of one to that of the next in its file.
        most: windows that are taken.

    Raises:
        ConfigError: an odd window, or a stride that is none.
        DatastoreError: no file is as long as a window.
    """
    require(window >= 2 and window % 2 == 0, "window", window, expected="an even number of tokens")
    require(1 <= stride <= window, "stride", stride, expected=f"1 to {window} tokens")
    pieces = []
    for file in files:
        text = file.path.read_bytes().decode("utf-8", "replace")
        tokens = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        begins = range(0, len(tokens) - window + 1, stride)
        pieces += [tokens[at : at + window] for at in begins]
    if not pieces:
        raise DatastoreError(
            f"held-out text: none of {len(files)} files has {window} tokens; give longer ones, or "
            "a smaller window"
        )
    chosen = np.unique(np.linspace(0, len(pieces) - 1, min(most, len(pieces))).astype(int))
    return [
        EvalWindow(
            pieces[at],
            tokenizer.decode(pieces[at][: window // 2].tolist()),
            tokenizer.decode(pieces[at].tolist()),
        )
        for at in chosen.tolist()
    ]


def prompt_of(tokenizer: Any, window: EvalWindow, passages: Sequence[str], most: int) -> np.ndarray:
    """Tokens of passages and a window, int64: the best passage lies nearest to the window.

    Args:
        tokenizer: of the reader.
        window: the end of the prompt.
        passages: the best first.
        most: tokens; the farthest are left out.
    """
    before = "".join(f"{one}\n\n" for one in reversed(passages))
    tokens = np.array(tokenizer.encode(before, add_special_tokens=False).ids, np.int64)
    return np.concatenate([tokens, window.tokens])[-most:]


class PassageReader:
    """A language model that reads passages in front of a window.

    Source: Ram et al., In-Context Retrieval-Augmented Language Models, 2023.

    Args:
        directory: of a Hugging Face model, with its tokenizer.
        digest: of the tokenizer with which a datastore counted tokens; empty for none.
        threads: of PyTorch's operators; 0 leaves them as they are.

    Attributes:
        parameters: of the model.
        cut: prompts whose farthest passages were cut, for they were longer than the model reads.

    Raises:
        DatastoreError: the reader has another tokenizer than the datastore.
        ShoalError: the model cannot be read.
    """

    def __init__(self, directory: Path, *, digest: str = "", threads: int = 0) -> None:
        import torch

        from shoal.corpora.tokenizer import load
        from shoal.fields.retrieve.datastore.building import tokenizer_digest
        from shoal.model import huggingface

        self.tokenizer = load(directory)
        if digest and digest != tokenizer_digest(directory):
            raise DatastoreError(
                f"{directory}: has another tokenizer than the one with which the datastore counted "
                "its tokens; build the datastore with this reader, or take readers that share one"
            )
        self._model = huggingface.read(directory, torch.float32).eval()
        self._threads = threads
        self.parameters = sum(one.numel() for one in self._model.parameters())
        self.cut = 0
        self._known: dict[tuple[bytes, tuple[str, ...]], float] = {}

    def losses(
        self, windows: Sequence[EvalWindow], passages: Sequence[Sequence[str]]
    ) -> np.ndarray:
        """Loss of each window in nats a token of its second half, float64 [windows].

        Args:
            windows: that are scored.
            passages: of each window, the best first: it is put nearest to the window.

        Raises:
            DatastoreError: the model reads no more than a window.
        """
        from shoal.kernel.threads import torch_threads

        with torch_threads(self._threads):
            return np.array(
                [self._loss(*both) for both in zip(windows, passages, strict=True)], np.float64
            )

    def _loss(self, window: EvalWindow, passages: Sequence[str]) -> float:
        key = (window.tokens.tobytes(), tuple(passages))
        if key not in self._known:
            self._known[key] = self._scored(window, passages)
        return self._known[key]

    def _scored(self, window: EvalWindow, passages: Sequence[str]) -> float:
        import torch

        size, most = len(window.tokens), self._model.config.max_position
        if size > most:
            raise DatastoreError(f"window = {size}: the reader reads at most {most} tokens")
        prompt = prompt_of(self.tokenizer, window, passages, most + 1)
        self.cut += len(prompt) > most
        data = torch.from_numpy(prompt[-most:])[None]
        half = size // 2
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            hidden = self._model.hidden(data[:, :-1])[:, -half:]
            logits = self._model.logits(hidden.reshape(half, -1))
        return float(torch.nn.functional.cross_entropy(logits.float(), data[0, -half:]))
