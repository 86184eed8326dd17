"""What a corpus and a packing are, and which documents are held out.

A corpus is read front to back, any number of times, always in the same order; it
keeps no state. A packing cuts windows out of a split's tokens; what it returns is a
function of its arguments alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from shoal.ir.estimate import Estimate, Interval
from shoal.ir.machine import Machine
from shoal.ir.plan import Work

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from shoal.corpora.chat.template import ChatTemplate

Split = Literal["train", "heldout"]

# One document in so many is held out, unless a corpus says otherwise.
HELDOUT_EVERY = 20


class Document(NamedTuple):
    """One text and the split it belongs to.

    Args:
        name: unique in its corpus: a relative path, or a path and a row.
        text: the text; never changed on the way to the tokenizer.
        split: train or heldout.
        learned: (begin, end) in characters of what is learned, in order and apart; None for all.
    """

    name: str
    text: str
    split: Split = "train"
    learned: tuple[tuple[int, int], ...] | None = None


@runtime_checkable
class Corpus(Protocol):
    """A source of documents that a job can name."""

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The documents of one split, or of both in the order of the corpus.

        Raises:
            DataError: something cannot be read; the message names the file.
        """

    def fingerprint(self) -> str:
        """Hexadecimal digest that changes when any document may have changed."""

    def num_bytes(self) -> int:
        """Bytes stored, for progress and sampling; text itself when not compressed."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Time that reading the tokens adds to one step."""


@runtime_checkable
class ChatSource(Corpus, Protocol):
    """A corpus that renders messages, of whose documents some text is learned."""

    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that a tokenizer learned from it has besides the usual one."""

    def with_model(self, directory: Path | None) -> ChatSource:
        """The corpus that renders with a model's chat template, unless it names one."""

    def chat_template(self) -> ChatTemplate:
        """How messages become text."""


class WindowTokens(Protocol):
    """What a packing cuts windows of: the tokens of a split, or which of them are learned."""

    offsets: np.ndarray
    """Where each document starts, and the end of the last, int64 [documents + 1]."""
    end_of_text: int
    """What stands for the end of a text."""

    def __len__(self) -> int:
        """Tokens, an end of text for each document included."""

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""

    def read(self, start: int, out_N: np.ndarray) -> None:
        """Fill ``out_N`` with the tokens from ``start`` on; after the last comes the first."""


@runtime_checkable
class Packing(Protocol):
    """How documents fill sequences of T inputs and T targets."""

    def num_windows(self, split: WindowTokens, seq_len: int) -> int:
        """Windows of one epoch."""

    def fill(
        self, split: WindowTokens, windows_N: np.ndarray, *, seq_len: int, seed: int, epoch: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens int64 [N, T+1] of the windows, and document ids int32 [N, T+1] or None.

        Attention and loss stay inside a document: position t may see s only if their
        ids are equal, and the prediction of t+1 counts only if it has the id of t.
        """

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Time that cutting windows adds to one step."""


def is_heldout(name: str, every: int = HELDOUT_EVERY) -> bool:
    """Whether the document called ``name`` is held out: ``sha256(name) % every == 0``.

    It depends on nothing but the name, so it never changes when files are added.
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % every == 0


def split_of(name: str, every: int = HELDOUT_EVERY) -> Split:
    """The split of the document called ``name``."""
    return "heldout" if is_heldout(name, every) else "train"


def data_time(
    work: Work,
    machine: Machine,
    *,
    bytes_per_token: float,
    row_s: float = 0.0,
    fixed_s: float = 0.0,
) -> Estimate:
    """An estimate made of bytes moved through the main memory of one rank and of fixed times.

    Args:
        work: the step.
        machine: whose memory is used.
        bytes_per_token: bytes read and written for one token of a window.
        row_s: s of one window.
        fixed_s: s that do not depend on the size of the batch.
    """
    rows = work.job.global_batch / work.job.parallel.dp
    moved = rows * (work.job.seq_len + 1) * bytes_per_token
    # Data is prepared on the host, whose memory a GPU machine does not describe.
    host = machine.device.kind == "cpu" and machine.device.main_memory.read_bandwidth
    seconds = fixed_s + rows * row_s + moved / (host or 10e9)
    return Estimate(step_s=Interval.around(seconds, 1.0), terms_s={"data": seconds})
