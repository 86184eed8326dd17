"""[74] Datastore: does loss keep falling with what a model can look up, and is a sweep cheap?

Source: Shao et al., Scaling Retrieval-Based Language Models with a Trillion-Token Datastore, 2024.

Python sources and documents of the installed packages. Two readers learn a tenth of them, in
windows behind passages of other files; held-out files of the same packages are judged in windows of
1,024 tokens, of which the second half is scored. Passages that repeat a window are dropped. Costs
are those of embedding, indexing and lists of a part of the passages, which both arms find mapped.
The A/A run puts passages of the sample at random before the windows, has the bare small reader
beside the bare large one, takes another sample than was indexed, and builds an index of each.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.datastore_arms import (
    READERS,
    WINDOW,
    LocalText,
    SweepArms,
    local_text,
    reader_of,
    same_lists,
    size_losses,
    spearman,
    surviving_runs,
)
from shoal.core.parts import Choice, part
from shoal.core.scratch import scratch_directory
from shoal.fields.retrieve.datastore import RetrievalOptions, StoreSweep, build_datastore
from shoal.fields.retrieve.datastore.execute import texts_of
from shoal.fields.retrieve.datastore.passages import PassageMap, map_passages

_METHODS = {"bm25": Choice(name="bm25"), "dense": Choice(name="dense")}
# A ratio of perplexities is a sample of each of so many parts of the windows.
_FOLDS = 6


@part
class DatastoreClaim(BaseClaim, row=74, needs=("torch", "pyarrow")):
    """Perplexity over the size of a datastore, and one search for all sizes.

    Args:
        words: of the text that is stored.
        prompts: that readers learn.
        windows: that are scored.
        timed: passages of the timing.
        queries: of the timing.
        rounds: of the timing.
    """

    words: int = 10_000_000
    prompts: int = 5_000
    windows: int = 48
    timed: int = 4_000
    queries: int = 16
    rounds: int = 5

    def collect(self, run: ClaimRun) -> None:
        """Lists beside those of rebuilt indexes; the full run reads, and times."""
        text = local_text(150_000 if run.quick else self.words)
        run.details["words"] = text.words
        passages = _mapped(text, 300 if run.quick else self.timed)
        asked = _mapped(text, self.queries, heldout=True)
        queries = asked.texts(np.arange(len(asked)))
        same, shards = same_lists(passages, queries, _METHODS["dense"], run.pick(1, 2))
        run.put("same_as_rebuilt", same)
        run.put("same_as_unsharded", shards)
        if run.quick:
            return
        self._read(run, text)
        arms = SweepArms(
            passages, queries, queries, _METHODS["dense"], (Choice(name="gopher_repetition"),)
        )
        run.progress("timing", 0.7)
        ours = run.pick(arms.once, arms.rebuilt)
        turns = run.turns({"ours": ours, "rebuilt": arms.rebuilt}, self.rounds, warmup=1)
        run.put("sweep_cost", turns["ours"], turns["rebuilt"])
        run.details["seconds"] = {name: float(np.median(one)) for name, one in turns.items()}

    def _read(self, run: ClaimRun, text: LocalText) -> None:
        readers = {
            name: run.remember(name, partial(self._reader, run, text, name)) for name in READERS
        }
        found = {
            method: run.remember(
                f"losses {method}", partial(self._losses, run, text, readers, method)
            )
            for method in _METHODS
        }
        for method, one in found.items():
            run.put(f"growth_{method}", one[run.pick("growth", "random_growth")])
        run.put("survivors", sum(one["survivors"] for one in found.values()))
        best = found["bm25"]
        small = _folded(best[run.pick("whole", "bare")])
        run.put("small_over_large", small, _folded(best["large"]))
        run.details["losses"] = found

    def _reader(self, run: ClaimRun, text: LocalText, name: str) -> Path:
        return reader_of(
            name, text, self.prompts, run.seed, lambda done, what: run.progress(what, done / 2)
        )

    def _losses(
        self, run: ClaimRun, text: LocalText, readers: dict[str, Path], method: str
    ) -> dict[str, Any]:
        """Losses of the readers with and without a datastore, as JSON."""
        from shoal.fields.retrieve.datastore.windows import PassageReader, eval_windows

        small, large = (PassageReader(readers[name], threads=2) for name in ("small", "large"))
        windows = eval_windows(
            text.heldout, small.tokenizer, window=WINDOW, stride=WINDOW // 2, most=self.windows
        )
        with scratch_directory("datastore") as root:
            store = build_datastore(
                root / "store", text.stored, method=_METHODS[method], tokenizer=readers["small"]
            )
            run.progress(f"{method}: searching", 0.5)
            sweep = StoreSweep(
                store, [one.query for one in windows], against=[one.text for one in windows],
                options=RetrievalOptions(),
            )  # fmt: skip
            run.progress(f"{method}: reading", 0.55)
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


def _mapped(text: LocalText, count: int, *, heldout: bool = False) -> PassageMap:
    """Passages that lie evenly in what is stored, or in what is held out."""
    files = text.heldout if heldout else text.stored[:: max(1, len(text.stored) // count)]
    rows = map_passages(files, 256)
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int))
    return PassageMap(files, [one.path.stat().st_size for one in files], rows[chosen])


def _folded(losses: list[float]) -> list[float]:
    """Perplexities of parts of the windows."""
    return [math.exp(float(np.mean(losses[at::_FOLDS]))) for at in range(min(_FOLDS, len(losses)))]
