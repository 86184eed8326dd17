"""What a target makes of a text: computed once, mapped into memory, read by every drafter.

::

    <home>/features/<key>/
    ├── index.json              sizes, and what the key stands for
    ├── train.tokens.bin        int32 [N, T]
    ├── train.hidden.bin        bfloat16 or float32 [N, T, D]: final hidden states
    ├── judged.tokens.bin       of the sequences on which guesses are judged
    └── judged.hidden.bin

The key is made of the target's weights, the text and the lengths, so features of another target
are never found. The directory appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import PositiveInt
from torch import Tensor

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import locked, shoal_home, write_dir_atomic, write_json
from shoal.corpora import CORPORA
from shoal.corpora.tokens import prepare
from shoal.ir.drafting import DrafterJob
from shoal.model.transformer import Transformer
from shoal.train.drafters.protocols import TargetRows
from shoal.train.drafters.texts import continued, windows

Progress = Callable[[int, int, str], None]

FORMAT = 1
INDEX = "index.json"
# Sequences that the target reads, or goes on with, at a time: a token of many costs little more.
_READ, _ROWS = 16, 64
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_PARTS = ("train", "judged")


class FeatureIndex(Value):
    """What ``index.json`` holds.

    Args:
        format: version of the files.
        target: fingerprint of the target.
        train: sequences to train on.
        judged: sequences on which draft tokens are evaluated.
        prompt: tokens at the beginning of a judged sequence that the target did not choose.
        dtype: of the hidden states.
        text: what the key stands for, for people.
    """

    format: Literal[1]
    target: str
    train: PositiveInt
    judged: PositiveInt
    seq_len: PositiveInt
    hidden: PositiveInt
    prompt: PositiveInt
    dtype: Literal["bfloat16", "float32"]
    text: str

    def files(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """File -> shape and bytes of an element."""
        size = 2 if self.dtype == "bfloat16" else 4
        files: dict[str, tuple[tuple[int, ...], int]] = {}
        for part in _PARTS:
            rows = getattr(self, part)
            files[f"{part}.tokens.bin"] = ((rows, self.seq_len), 4)
            files[f"{part}.hidden.bin"] = ((rows, self.seq_len, self.hidden), size)
        return files


class Features:
    """Sequences of a text and a target's hidden states, mapped into memory.

    Args:
        path: the directory.
        index: its index, already checked.
    """

    def __init__(self, path: Path, index: FeatureIndex) -> None:
        self.path, self.index = path, index
        self._maps = {
            name: np.memmap(path / name, dtype={2: "<u2", 4: "<i4"}[size], mode="r", shape=shape)
            for name, (shape, size) in index.files().items()
        }

    def rows(self, part: str, numbers: Sequence[int], dtype: torch.dtype) -> TargetRows:
        """Some sequences.

        Args:
            part: train or judged.
            numbers: which.
            dtype: of the computation.
        """
        some = np.asarray(numbers)
        tokens = torch.from_numpy(self._maps[f"{part}.tokens.bin"][some].astype(np.int64))
        raw = torch.from_numpy(self._maps[f"{part}.hidden.bin"][some])
        return TargetRows(tokens, raw.view(_DTYPES[self.index.dtype]).to(dtype))


def key_of(job: DrafterJob, target: str, tokenizer: str) -> tuple[str, str]:
    """The name of the features that a job reads, and the text it stands for.

    Raises:
        DataError: the data cannot be read.
    """
    fields: dict[str, Any] = {
        "format": FORMAT,
        "target": target,
        "tokenizer": tokenizer,
        "data": None,
        "own": job.own_text,
        "seq_len": job.seq_len,
        "sequences": job.sequences,
        "judged": job.calibration_prompts,
        "prompt": job.prompt_tokens,
        "precision": job.precision,
        "seed": job.seed,
    }
    if job.data is not None:
        corpus = CORPORA.build(job.data, where="data")
        fields["data"] = [repr(corpus), corpus.fingerprint()]
    if job.own_text:
        fields["temperatures"] = list(job.temperatures)
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32], text


def prepare_features(
    job: DrafterJob,
    target: Transformer,
    *,
    fingerprint: str,
    tokenizer: str,
    root: Path | None = None,
    progress: Progress | None = None,
) -> Features:
    """The features of a job: those that lie there, or computed now.

    Args:
        job: names the text.
        target: in the dtype of the computation.
        fingerprint: of the target.
        tokenizer: hash of its tokenizer.
        root: directory of all features; ``$SHOAL_HOME/features`` if not given.
        progress: called with sequences done, sequences in all and what is being done.

    Raises:
        DataError: the text cannot be read or is too short, or the place cannot be written.
    """
    say = progress or (lambda done, total, text: None)
    root = root if root is not None else shoal_home() / "features"
    key, text = key_of(job, fingerprint, tokenizer)
    path = root / key

    def waiting() -> None:
        say(0, 0, "waiting for another process to compute the features")

    with locked(root / f"{key}.lock", waiting, error=DataError):
        if path.exists():
            try:
                return open_features(path)
            except DataError as cause:
                say(0, 0, f"{cause}; computing it again")
                shutil.rmtree(path, ignore_errors=True)
        for leftover in root.glob(f".{key}.*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        _compute(path, job, target, fingerprint, text, say)
        return open_features(path)


def _compute(
    path: Path, job: DrafterJob, target: Transformer, fingerprint: str, text: str, say: Progress
) -> None:
    prompts, judged = _prompts(job, target, say)
    index = FeatureIndex(
        format=FORMAT,
        target=fingerprint,
        train=len(prompts),
        judged=len(judged),
        seq_len=job.seq_len,
        hidden=target.config.hidden,
        prompt=job.prompt_tokens,
        dtype="bfloat16" if target.weight.dtype == torch.bfloat16 else "float32",
        text=text,
    )
    total = len(prompts) + len(judged)
    with write_dir_atomic(path, error=DataError) as place:
        maps = {
            name: np.memmap(place / name, dtype={2: "<u2", 4: "<i4"}[size], mode="w+", shape=shape)
            for name, (shape, size) in index.files().items()
        }

        def put(part: str, first: int, tokens: Tensor, hidden: Tensor) -> None:
            stop = first + len(tokens)
            maps[f"{part}.tokens.bin"][first:stop] = tokens.to(torch.int32).numpy()
            kind = torch.uint16 if hidden.dtype == torch.bfloat16 else torch.int32
            maps[f"{part}.hidden.bin"][first:stop] = hidden.view(kind).numpy()
            say(first + len(tokens) + (len(prompts) if part == "judged" else 0), total, text_of)

        text_of = "the target writes" if job.own_text else "the target reads"
        rows = _ROWS if job.own_text else _READ
        for first in range(0, len(prompts), rows):
            put("train", first, *_trained_on(job, target, prompts[first : first + rows], first))
        text_of = "the target continues prompts"
        for first in range(0, len(judged), _ROWS):
            put("judged", first, *_judged_on(job, target, judged[first : first + _ROWS], first))
        for mapped in maps.values():
            mapped.flush()
        write_json(place / INDEX, index.model_dump(mode="json"), error=DataError)


def _prompts(job: DrafterJob, target: Transformer, say: Progress) -> tuple[Tensor, Tensor]:
    """What the sequences to train on begin with, or are; and those that are judged."""
    config = target.config
    if job.data is None:
        opening = config.bos_token_id if config.bos_token_id is not None else 0
        if config.bos_token_id is None and config.eos_ids:
            opening = config.eos_ids[0]
        made = torch.full((job.sequences + job.calibration_prompts, 1), opening)
        return made[: job.sequences], made[job.sequences :]
    tokens = prepare(
        job.data, str(Path(job.model) / "tokenizer.json"), config.vocab_size, progress=say
    )
    result = torch.from_numpy(
        windows(tokens.train, job.seq_len, job.sequences, job.calibration_prompts, job.seed)
    )
    count = len(result) - job.calibration_prompts
    train, judged = result[:count], result[count:, : job.prompt_tokens]
    return (train[:, : job.prompt_tokens] if job.own_text else train), judged


@torch.no_grad()
def _trained_on(
    job: DrafterJob, target: Transformer, prompts: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    if not job.own_text:
        return prompts, target.hidden(prompts)
    count = len(job.temperatures)
    heat = [job.temperatures[(first + row) % count] for row in range(len(prompts))]
    # Where nothing but the opening is given, a greedy text would always be the same one.
    warm = [max(one, 1.0) for one in heat]

    def temperatures(place: int) -> Sequence[float]:
        return warm if job.data is None and place < job.prompt_tokens else heat

    return continued(target, prompts, job.seq_len, temperatures, job.seed + first)


def _judged_on(
    job: DrafterJob, target: Transformer, prompts: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Greedy from the end of the prompt on; the target writes the prompt where none is given."""

    def temperatures(place: int) -> Sequence[float]:
        return [1.0 if place < job.prompt_tokens else 0.0] * len(prompts)

    return continued(target, prompts, job.seq_len, temperatures, job.seed + first + 2**20)


def open_features(path: Path) -> Features:
    """Map existing features.

    Raises:
        DataError: a file is missing or has changed since it was written; names it.
    """
    source = path / INDEX
    try:
        index = parse(FeatureIndex, json.loads(source.read_bytes()), where=str(source))
        for name, (shape, size) in index.files().items():
            there, wanted = (path / name).stat().st_size, int(np.prod(shape)) * size
            if there != wanted:
                raise DataError(f"{path / name}: {there} bytes, not the {wanted} that were written")
        return Features(path, index)
    except (OSError, ValueError, ConfigError) as cause:
        raise DataError(f"{path}: no features of a target ({cause}); delete it") from cause
