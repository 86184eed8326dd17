"""[89] Logs: is Drain as accurate as published, eight times drain3, and are logs half a size?

Source: Zhu et al., Loghub: A Large Collection of System Log Datasets for AI-driven Log Analytics,
2023; Zhu et al., Tools and Benchmarks for Automated Log Parsing, 2019; He et al., Drain, 2017.

Both parsers begin with the bytes of the contents of lines, have the same masks and settings, and
run in one process. The A/A run has drain3, zstd, and lines that are masked and not merged.
"""

from __future__ import annotations

import math

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.logs_data import (
    PUBLISHED,
    LabelledLog,
    block_sessions,
    local_logs,
    loghub_folder,
    resampled,
    sample,
    samples_in,
    sessions_with_errors,
)
from shoal.claims.experiments.logs_runs import (
    all_of,
    drain3_over,
    grouping,
    packed_sizes,
    parsed,
    scored,
)
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part, table
from shoal.fields.data.logs.anomalies.groups import EventCollector, detection_f1
from shoal.fields.data.logs.formats import FORMATS
from shoal.fields.data.logs.parsers.drain import DrainParser
from shoal.fields.data.logs.reading import block_of, masked

_OF_CATALOGUE = ("accuracy_over_published", "packed_over_zstd", "over_drain3", "accuracy_apart")
_GENERATED = ("HDFS", "BGL", "OpenSSH", "Spark", "Zookeeper")


@part
class LogsClaim(BaseClaim, row=89, needs=("c++", "zstandard", "drain3")):
    """Loghub's samples, a million lines like those of five of them, and logs of this machine.

    Args:
        lines: of each of the five.
        pairs: rounds of the timing.
    """

    lines: int = 200_000
    pairs: int = 5

    def collect(self, run: ClaimRun) -> None:
        """Count on the samples; the full run times both parsers for some minutes."""
        unmerged = DrainParser(similarity=1.0)
        ours = run.pick(DrainParser(), unmerged)
        local = [scored(ours, log) for log in run.remember("local", local_logs)]
        run.put("local_grouping", min(one.grouping_accuracy for one in local))
        run.put("local_parsing", min(one.parsing_accuracy for one in local))
        self._anomalies(run)
        folder = loghub_folder(run.context.data)
        if folder is None:
            run.skip("no samples of Loghub: give --data DIR, or set SHOAL_DATA", *_OF_CATALOGUE)
            return
        logs = [sample(path) for path in samples_in(folder).values()]
        every = {log.name: scored(ours, log) for log in logs}
        # Published with three digits; so many are compared.
        ahead = [
            math.floor(1000 * one.grouping_accuracy + 0.5) / 1000 - PUBLISHED[name]
            for name, one in every.items()
            if name in PUBLISHED
        ]
        run.put("accuracy_over_published", min(ahead))
        run.details["systems"] = {name: one._asdict() for name, one in every.items()}
        sizes = {log.name: packed_sizes(log) for log in [*logs, *run.remember("local", local_logs)]}
        run.details["bytes"] = sizes
        total = np.array(list(sizes.values())).sum(axis=0)
        run.put("packed_over_zstd", run.pick(total[0], total[1]) / total[1])
        if run.quick:
            return
        made = run.remember("made", lambda: self._made(logs, run.seed))
        theirs = [drain3_over(log) for log in made]
        apart = [
            abs(scored(ours, log).grouping_accuracy - grouping(log, ids()))
            for log, ids in zip(made, theirs, strict=True)
        ]
        run.put("accuracy_apart", max(apart))
        method = run.pick(lambda: [parsed(ours, log) for log in made], lambda: all_of(theirs))
        arms = {"method": method, "baseline": lambda: all_of(theirs)}
        run.progress("timing drain3", 0.4)
        seconds = run.race(arms, self.pairs, warmup=0, swaps={})
        run.put("over_drain3", seconds["method"], seconds["baseline"])

    def _made(self, logs: list[LabelledLog], seed: int) -> list[LabelledLog]:
        some = [log for log in logs if log.name in _GENERATED]
        return [resampled(log, self.lines, seed) for log in some]

    def _anomalies(self, run: ClaimRun) -> None:
        """Faults in sessions, by counts of events and by a search for words."""
        text, faulty = run.remember("sessions", lambda: block_sessions(6000, run.seed))
        form = FORMATS["HDFS"]
        block = block_of(text, form)
        miner = DrainParser().suited(form.depth, form.similarity).open()
        groups = miner.add(masked(block.field(-1), form.masks))
        mined = miner.finish()
        collector = EventCollector(form, 100)
        collector.add(block, mined.ids[groups])
        found = collector.groups(len(mined.templates))
        labels = np.array([faulty[name] for name in found.names])
        spoken = sessions_with_errors(text)
        words = np.array([name in spoken for name in found.names])
        detection = table("anomaly_detector").build("pca").detect(found, run.seed)
        by_words = detection._replace(anomalous=words)
        run.put("anomaly_f1", detection_f1(run.pick(detection, by_words), labels))
        run.put("keyword_f1", detection_f1(by_words, labels))
