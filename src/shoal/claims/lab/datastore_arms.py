"""Text of the installed packages, small readers that have learned a tenth of it, and their arms.

Files are drawn by a hash of their names until there are as many words as are wanted; a few of them
are held out, for judging and for choosing, and are never stored.
"""

from __future__ import annotations

import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.claims.experiments.tiny import llama
from shoal.core.errors import DataError
from shoal.core.files import shoal_home, write_dir_atomic
from shoal.core.parts import Choice
from shoal.core.random import generator
from shoal.core.scratch import scratch_directory
from shoal.fields.retrieve.datastore import (
    RetrievalOptions,
    StoreSweep,
    build_datastore,
    index_passages,
)
from shoal.fields.retrieve.datastore.execute import texts_of
from shoal.fields.retrieve.datastore.lists import passing
from shoal.fields.retrieve.datastore.passages import PassageMap, TextFile, map_passages
from shoal.fields.retrieve.datastore.windows import (
    EvalWindow,
    PassageReader,
    eval_windows,
    prompt_of,
)
from shoal.fields.retrieve.grank.text import terms

READERS = {"small": 96, "large": 192}
"""Reader -> its width; the larger has three times the parameters."""

_VOCAB, _LAYERS, _HEAD, _CONTEXT = 4096, 4, 32, 4096
# Tokens of a window and of a prompt, and passages of it.
WINDOW, _PROMPT, _PASSAGES = 1024, 3584, 3
# Peak learning rate, steps in which it rises, and the share of the steps in which it falls.
_LR, _WARM, _FALLING = 3e-3, 60, 0.3
_LEAST, _MOST = 2_000, 200_000
# A ratio of perplexities is a sample of each of so many parts of the windows.
_FOLDS = 6
# Passages of a list of an index that is built for one sample: few are dropped.
_SHALLOW = 30


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
    return LocalText(named["stored"], named["learned"], named["heldout"], named["valid"], count)


def _draw(name: Path) -> int:
    return int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest()[:8], "big")


def learned_tokenizer(text: LocalText) -> Any:
    """A tokenizer of what readers learn."""
    from shoal.corpora import tokenizer

    texts = [file.path.read_bytes().decode("utf-8", "replace") for file in text.learned]
    return tokenizer.train(tokenizer.sample(texts, sum(map(len, texts))), _VOCAB)


def prompts(text: LocalText, tokenizer: Any, place: Path, count: int, seed: int) -> list[Any]:
    """What readers learn: windows of the tenth behind passages of other files of the tenth.

    Args:
        text: of which a tenth is learned.
        tokenizer: of the readers.
        place: a directory for the datastore of the tenth.
        count: prompts.
        seed: of their order.

    Returns:
        Int64 [tokens] each.
    """
    windows = eval_windows(text.learned, tokenizer, window=WINDOW, stride=WINDOW // 2, most=1 << 40)
    store = build_datastore(place, text.learned)
    order = generator(seed, purpose="datastore prompts").permutation(len(windows))
    chosen = [windows[at] for at in np.resize(order, count)]
    lists = store.search([one.query for one in chosen], 4 * _PASSAGES)
    rows = []
    for window, ids in zip(chosen, lists.ids, strict=True):
        # What follows the query in its own file is not what a reader finds later.
        texts = [one for one in store.passages.texts(ids[ids >= 0]) if one[:80] not in window.text]
        rows.append(prompt_of(tokenizer, window, texts[:_PASSAGES], _PROMPT))
    return rows


def make_reader(
    width: int,
    rows: Sequence[np.ndarray],
    tokenizer: Any,
    directory: Path,
    *,
    seed: int,
    say: Callable[[float, float], None] = lambda done, loss: None,
) -> None:
    """Train a reader on prompts, and write it as a Hugging Face directory.

    Args:
        width: of the model.
        rows: prompts, int64 [tokens] each.
        tokenizer: of them.
        directory: that is written.
        seed: of the weights.
        say: called with the share that is done, and the loss of a step in nats a token.
    """
    import torch

    from shoal.model import huggingface
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer
    from shoal.train import OPTIMIZERS

    config = llama(
        width, _LAYERS, width // _HEAD, vocab=_VOCAB, length=_CONTEXT, tied=True,
        initializer_range=0.02,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, seed)
    updater = OPTIMIZERS.build({"name": "muon", "lr": _LR}).build(dict(model.named_parameters()))
    for step, row in enumerate(rows):
        data = torch.from_numpy(row)[None]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss_sum(data[:, :-1], data[:, 1:]) / (len(row) - 1)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        left = 1 - step / len(rows)
        updater.step(min(1.0, (step + 1) / _WARM, left / _FALLING))
        model.zero_grad()
        say((step + 1) / len(rows), float(loss.detach()))
    with write_dir_atomic(directory) as place:
        tokenizer.save(str(place / "tokenizer.json"))
        huggingface.write(place / "model", model, place / "tokenizer.json")


def reader_of(
    name: str, text: LocalText, count: int, seed: int, say: Callable[[float, str], None]
) -> Path:
    """The directory of a reader, which is trained if no run has done it before.

    Args:
        name: of :data:`READERS`.
        text: of which it learns a tenth.
        count: prompts that it learns.
        seed: of weights and order.
        say: called with the share that is done, and what is being done.
    """
    facts = [[file.name, file.path.stat().st_size] for file in text.learned]
    given = json.dumps([facts, name, READERS[name], count, seed, Path(__file__).read_text()])
    key = hashlib.sha256(given.encode()).hexdigest()[:12]
    place = shoal_home() / "datastore-readers" / f"{name}-{key}"
    if not place.exists():
        tokenizer = learned_tokenizer(text)
        with scratch_directory("prompts") as root:
            rows = prompts(text, tokenizer, root / "tenth", count, seed)
        make_reader(
            READERS[name], rows, tokenizer, place, seed=seed,
            say=lambda done, loss: say(done, f"the reader {name} learns: {loss:.3f} nats"),
        )  # fmt: skip
    return place / "model"


SHARES = tuple(2.0**-power for power in range(6, -1, -1))
"""Sizes of a datastore, as shares of the whole."""


def spearman(points: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of pairs; 0 where one side does not change."""
    from scipy.stats import spearmanr

    x, y = zip(*points, strict=True)
    if len(set(x)) < 2 or len(set(y)) < 2:
        return 0.0
    return float(spearmanr(x, y).statistic)


def size_losses(
    sweep: StoreSweep,
    passages: PassageMap,
    reader: PassageReader,
    windows: Sequence[EvalWindow],
    seeds: int,
    *,
    random: bool = False,
) -> dict[str, Any]:
    """Tokens and losses of every size and sample.

    Args:
        sweep: of the windows.
        passages: of the datastore.
        reader: that scores.
        windows: that are scored.
        seeds: samples of each size.
        random: passages are drawn from the sample instead of retrieved: the baseline.

    Returns:
        ``points``: (tokens, mean loss) of each; ``whole``: loss of each window with all of it.
    """
    points, losses = [], np.zeros(len(windows))
    for share in SHARES:
        for seed in range(seeds):
            some = sweep.first(share, seed)
            if random:
                draw = generator(seed, purpose="passages at random", index=round(1 / share))
                there = np.flatnonzero(passages.sampled(share, seed))
                ids = draw.choice(there, some.lists.ids.shape)
                some = some._replace(lists=some.lists._replace(ids=ids))
            losses = reader.losses(windows, texts_of(passages, some))
            points.append((passages.tokens(share, seed), float(losses.mean())))
    return {"points": points, "whole": losses.tolist()}


def surviving_runs(texts: Sequence[Sequence[str]], windows: Sequence[EvalWindow]) -> int:
    """Passages that share 33 words in a row with the window that they stand before."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = terms(text)
        return {tuple(words[at : at + 33]) for at in range(len(words) - 32)}

    return sum(
        bool(runs(one) & runs(window.text))
        for window, row in zip(windows, texts, strict=True)
        for one in row
    )


@dataclass(frozen=True)
class SweepArms:
    """All sizes, samples and filters by one index, or by an index of each.

    Args:
        passages: that are mapped.
        queries: texts.
        targets: text that is judged, of each.
        method: of the index.
        filters: of the second set.
        seeds: samples of each size.
        depth: passages of a list of the one index; those of a small index are as deep as they need.
    """

    passages: PassageMap
    queries: Sequence[str]
    targets: Sequence[str]
    method: Choice
    filters: tuple[Choice, ...]
    seeds: int = 3
    depth: int = 1000

    def once(self) -> float:
        """Seconds of one index and its lists."""
        begin = time.perf_counter()
        with scratch_directory("once") as root:
            store = index_passages(root / "store", self.passages, method=self.method)
            sweep = StoreSweep(
                store, self.queries, against=self.targets,
                options=RetrievalOptions(depth=self.depth), filters=dict(self._sets()),
            )  # fmt: skip
            for name, _ in self._sets():
                for share in SHARES:
                    for seed in range(self.seeds):
                        sweep.first(share, seed, name)
        return time.perf_counter() - begin

    def rebuilt(self) -> float:
        """Seconds of an index for each; what a filter drops is not indexed."""
        begin = time.perf_counter()
        for _, filters in self._sets():
            for share in SHARES:
                for seed in range(self.seeds):
                    self._one(filters, share, seed)
        return time.perf_counter() - begin

    def _one(self, filters: Sequence[Choice], share: float, seed: int) -> None:
        rows = self.passages.rows[self.passages.sampled(share, seed)]
        some = replace(self.passages, rows=rows)
        if filters:
            some = replace(some, rows=rows[passing(some.texts(np.arange(len(rows))), filters)])
        with scratch_directory("rebuilt") as root:
            store = index_passages(root / "store", some, method=self.method)
            options = RetrievalOptions(depth=min(_SHALLOW, len(store)), k=min(3, len(store)))
            StoreSweep(store, self.queries, against=self.targets, options=options).first()

    def _sets(self) -> tuple[tuple[str, tuple[Choice, ...]], ...]:
        return (("all", ()), ("filtered", self.filters))


def same_lists(
    passages: PassageMap, queries: Sequence[str], method: Choice, seed: int
) -> tuple[float, float]:
    """Shares of lists that are the same: of samples and indexes of them; of shards and of one.

    Args:
        passages: that are indexed.
        queries: texts.
        method: of the indexes.
        seed: of the samples; the indexes have those of seed 1.
    """
    plain = RetrievalOptions(dedupe=False, decontaminate=False)
    same, shards = [], []
    with scratch_directory("lists") as root:
        whole = index_passages(root / "whole", passages, method=method)
        cut = index_passages(
            root / "cut", passages, method=method, shard_passages=len(passages) // 3
        )
        sweep = StoreSweep(whole, queries, options=plain)
        for share in SHARES[2:]:
            built = index_passages(root / f"{share}", passages, method=method, share=share, seed=1)
            ours = sweep.first(share, seed).lists.ids
            numbers = np.append(np.flatnonzero(whole.passages.sampled(share, 1)), -1)
            theirs = numbers[StoreSweep(built, queries, options=plain).first().lists.ids]
            same.append((ours == theirs).all(axis=1).mean())
        shards.append((cut.search(queries, 50).ids == whole.search(queries, 50).ids).all(axis=1))
    return float(np.mean(same)), float(np.mean(shards))


def reader_losses(
    text: LocalText,
    readers: Mapping[str, Path],
    method: Choice,
    most: int,
    say: Callable[[str, float], None],
) -> dict[str, Any]:
    """Losses of the readers with and without a datastore, as JSON.

    Args:
        text: of which one part is stored, and another judged.
        readers: directories of ``small`` and ``large``.
        method: how passages are found.
        most: windows.
        say: called with what is being done.
    """
    small, large = (PassageReader(readers[name], threads=2) for name in ("small", "large"))
    windows = eval_windows(
        text.heldout, small.tokenizer, window=WINDOW, stride=WINDOW // 2, most=most
    )
    with scratch_directory("datastore") as root:
        store = build_datastore(
            root / "store", text.stored, method=method, tokenizer=readers["small"]
        )
        say(f"{method}: searching", 0.5)
        sweep = StoreSweep(
            store, [one.query for one in windows], against=[one.text for one in windows],
            options=RetrievalOptions(),
        )  # fmt: skip
        say(f"{method}: reading", 0.55)
        ours = size_losses(sweep, store.passages, small, windows, 3)
        drawn = size_losses(sweep, store.passages, small, windows, 3, random=True)
        texts = texts_of(store.passages, sweep.first())
        bare: list[tuple[str, ...]] = [()] * len(windows)
        return {
            **ours,
            "growth": spearman(ours["points"]),
            "random_growth": spearman(drawn["points"]),
            "random_points": drawn["points"],
            "survivors": surviving_runs(texts, windows),
            "overlap": sweep.overlap,
            "bare": small.losses(windows, bare).tolist(),
            "large": large.losses(windows, bare).tolist(),
            "large_whole": large.losses(windows, texts).tolist(),
            "parameters": [small.parameters, large.parameters],
            "passages": len(store),
        }


def mapped(text: LocalText, count: int, *, heldout: bool = False) -> PassageMap:
    """Passages that lie evenly in what is stored, or in what is held out."""
    files = text.heldout if heldout else text.stored[:: max(1, len(text.stored) // count)]
    rows = map_passages(files, 256)
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int))
    return PassageMap(files, [one.path.stat().st_size for one in files], rows[chosen])


def folded(losses: list[float]) -> list[float]:
    """Perplexities of parts of the windows."""
    return [math.exp(float(np.mean(losses[at::_FOLDS]))) for at in range(min(_FOLDS, len(losses)))]
