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

from functools import partial
from pathlib import Path

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.datastore_arms import (
    READERS,
    LocalText,
    SweepArms,
    folded,
    local_text,
    mapped,
    reader_losses,
    reader_of,
    same_lists,
)
from shoal.core.parts import Choice, part

_METHODS = {"bm25": Choice(name="bm25"), "dense": Choice(name="dense")}


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
        passages = mapped(text, 300 if run.quick else self.timed)
        asked = mapped(text, self.queries, heldout=True)
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
                f"losses {method}",
                partial(reader_losses, text, readers, choice, self.windows, run.progress),
            )
            for method, choice in _METHODS.items()
        }
        for method, one in found.items():
            run.put(f"growth_{method}", one[run.pick("growth", "random_growth")])
        run.put("survivors", sum(one["survivors"] for one in found.values()))
        best = found["bm25"]
        small = folded(best[run.pick("whole", "bare")])
        run.put("small_over_large", small, folded(best["large"]))
        run.details["losses"] = found

    def _reader(self, run: ClaimRun, text: LocalText, name: str) -> Path:
        return reader_of(
            name, text, self.prompts, run.seed, lambda done, what: run.progress(what, done / 2)
        )
