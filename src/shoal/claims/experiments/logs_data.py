"""Logs for the claim ``logs``: Loghub's samples, more lines like theirs, local logs, and sessions.

What is made from a sample keeps its text: a line of the sample is drawn, its template by Zipf's
law, and the digits of its parameters are drawn anew, so that lines differ as those of a long log.
"""

from __future__ import annotations

import csv
import os
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.core.random import generator
from shoal.fields.data.logs.formats import FORMATS, LogFormat, format_named
from shoal.fields.data.logs.imports_log import imports_log
from shoal.fields.data.logs.score import read_truth

# Grouping accuracy of Drain, Zhu et al., Tools and Benchmarks for Automated Log Parsing, 2019,
# table 2 (of its arXiv version and the authors' repository).
PUBLISHED = {
    "HDFS": 0.998, "Hadoop": 0.948, "Spark": 0.920, "Zookeeper": 0.967, "OpenStack": 0.733,
    "BGL": 0.963, "HPC": 0.887, "Thunderbird": 0.955, "Windows": 0.997, "Linux": 0.690,
    "Mac": 0.787, "Android": 0.911, "HealthApp": 0.780, "Apache": 1.000, "OpenSSH": 0.788,
    "Proxifier": 0.527,
}  # fmt: skip

_DPKG = Path("/var/log/dpkg.log")
_ZIPF = 1.2
_BLOCK = "blk_{}"


class LabelledLog(NamedTuple):
    """A log whose templates are known.

    Args:
        name: of the system.
        form: its format.
        text: the file.
        contents: contents of its lines.
        ids: int64 [n], true template of each line.
        templates: text of each.
    """

    name: str
    form: LogFormat
    text: bytes
    contents: list[bytes]
    ids: np.ndarray
    templates: list[str]


def loghub_folder(data: Path | None) -> Path | None:
    """The user's folder, or ``loghub`` below ``$SHOAL_DATA``; None where there is none."""
    places = [
        data,
        Path(os.environ["SHOAL_DATA"]) / "loghub" if "SHOAL_DATA" in os.environ else None,
    ]
    return next((one for one in places if one is not None and samples_in(one)), None)


def samples_in(folder: Path) -> dict[str, Path]:
    """System -> its sample, in Loghub's layout or with all files side by side."""
    found = {}
    for path in sorted([*folder.glob("*_2k.log"), *folder.glob("*/*_2k.log")]):
        name = path.name.removesuffix("_2k.log")
        if name in FORMATS and Path(f"{path}_structured.csv").exists():
            found[name] = path
    return found


@cache
def sample(path: Path) -> LabelledLog:
    """A sample with its truth."""
    truth = Path(f"{path}_structured.csv").read_bytes()
    known = read_truth(truth, str(path))
    rows = csv.DictReader(truth.decode("utf-8", "replace").splitlines())
    name = path.name.removesuffix("_2k.log")
    contents = [row["Content"].encode() for row in rows]
    return LabelledLog(
        name, format_named(name), path.read_bytes(), contents, known.ids, known.templates
    )


def resampled(log: LabelledLog, n: int, seed: int) -> LabelledLog:
    """Lines like those of a sample, n of them, without headers.

    Args:
        log: the sample.
        n: lines.
        seed: of the draws.
    """
    draw = generator(seed, purpose=f"lines like those of {log.name}")
    kinds, sizes = np.unique(log.ids, return_counts=True)
    order = kinds[np.argsort(-sizes, kind="stable")]
    share = 1.0 / np.arange(1, len(order) + 1) ** _ZIPF
    chosen = order[draw.choice(len(order), n, p=share / share.sum())]
    source = np.empty(n, np.int64)
    for kind in order:
        rows, of_kind = np.flatnonzero(log.ids == kind), np.flatnonzero(chosen == kind)
        source[of_kind] = rows[draw.integers(0, len(rows), len(of_kind))]
    lines: list[bytes] = [b""] * n
    for row in np.unique(source).tolist():
        places = np.flatnonzero(source == row).tolist()
        line = np.frombuffer(log.contents[row], np.uint8)
        block = np.tile(line, (len(places), 1))
        digits = _parameter_digits(log.contents[row], log.templates[log.ids[row]])
        if len(digits):
            drawn = draw.integers(48, 58, (len(places), len(digits)))
            # A number keeps its length: no zero begins it that did not.
            starts = [at == 0 or not 48 <= line[at - 1] <= 57 for at in digits]
            leading = np.array(starts) & (line[digits] != 48)
            drawn[:, leading] = np.maximum(drawn[:, leading], 49)
            block[:, digits] = drawn
        for place, made in zip(places, block, strict=True):
            lines[place] = made.tobytes()
    text = b"\n".join(lines) + b"\n"
    return LabelledLog(log.name, log.form, text, lines, log.ids[source], log.templates)


def _parameter_digits(content: bytes, template: str) -> np.ndarray:
    """Places of the digits of a line that are of its parameters."""
    literal = [re.escape(one).replace(r"\ ", r"\s+") for one in template.split("<*>")]
    found = re.fullmatch("(.*?)".join(literal).encode(), content.strip())
    if found is None:
        return np.empty(0, np.int64)
    offset = len(content) - len(content.lstrip())
    spans = [found.span(at) for at in range(1, (found.re.groups or 0) + 1)]
    return np.array(
        [at + offset for a, b in spans for at in range(a, b) if 48 <= content[at + offset] <= 57],
        np.int64,
    )


def local_logs() -> list[LabelledLog]:
    """Logs of this machine whose templates follow from the programs that wrote them.

    Those of Python's imports, by the formats in its source; and of dpkg, where there is one, whose
    every line is an action and its arguments, by ``log_message`` of its source.
    """
    path = imports_log()
    truth = read_truth(Path(f"{path}_structured.csv").read_bytes(), str(path))
    text = path.read_bytes()
    python = FORMATS["python_imports"]
    logs = [LabelledLog("imports", python, text, text.splitlines(), truth.ids, truth.templates)]
    if _DPKG.exists() and (text := _DPKG.read_bytes()):
        contents = [line.split(b" ", 2)[2] for line in text.splitlines()]
        templates: dict[str, int] = {}
        ids = []
        for line in contents:
            action, *arguments = line.decode().split()
            template = " ".join([action, *["<*>"] * len(arguments)])
            ids.append(templates.setdefault(template, len(templates)))
        form = FORMATS["dpkg"]
        logs.append(LabelledLog("dpkg", form, text, contents, np.array(ids), list(templates)))
    return logs


def block_sessions(sessions: int, seed: int) -> tuple[bytes, dict[str, bool]]:
    """A log of HDFS, with faults in one block of thirty, and which blocks have one.

    A block is allocated, received by three nodes, stored, served now and then, and deleted; the
    lines of blocks are mixed. A fault is a replica that is lost, a transfer that ends early, a
    block that is served from a node that does not have it, or one that is stored again. Some
    faults, and some lines of sound blocks, say "error" or "exception".

    Args:
        sessions: blocks.
        seed: of the draws.
    """
    draw = generator(seed, purpose="sessions of blocks")
    rows: list[tuple[float, str]] = []
    faulty: dict[str, bool] = {}
    for _ in range(sessions):
        name = _BLOCK.format(int(draw.integers(-(2**62), 2**62)))
        fault = int(draw.integers(1, 5)) if draw.random() < 1 / 30 else 0
        faulty[name] = fault > 0
        at = float(draw.random() * sessions)
        for line in _life(name, fault, draw):
            at += float(draw.exponential(0.2))
            rows.append((at, line))
    rows.sort()
    head = "081109 {:02}{:02}{:02} {} INFO {}\n"
    text = "".join(
        head.format(at // 3600 % 24, at // 60 % 60, at % 60, int(draw.integers(10, 999)), line)
        for at, line in ((int(when), line) for when, line in rows)
    )
    return text.encode(), faulty


def sessions_with_errors(text: bytes) -> set[str]:
    """Blocks of a log of HDFS of which a line says "error", in small letters or large."""
    lines = (line for line in text.decode().splitlines() if "error" in line.lower())
    return {line[line.find("blk_") :].split()[0].rstrip(",") for line in lines if "blk_" in line}


def _life(name: str, fault: int, draw: np.random.Generator) -> list[str]:
    def node() -> str:
        return f"10.{draw.integers(250, 252)}.{draw.integers(1, 255)}.{draw.integers(1, 255)}:50010"

    nodes = [node() for _ in range(3)]
    size = int(draw.integers(1, 67108865))
    lines = [f"dfs.FSNamesystem: BLOCK* NameSystem.allocateBlock: /data/part-{size % 2000}. {name}"]
    lines += [
        f"dfs.DataNode$DataXceiver: Receiving block {name} src: /{node()} dest: /{one}"
        for one in nodes
    ]
    stored = [
        f"dfs.FSNamesystem: BLOCK* NameSystem.addStoredBlock: blockMap updated: {one} is added to "
        f"{name} size {size}"
        for one in nodes
    ]
    done = [
        f"dfs.DataNode$PacketResponder: Received block {name} of size {size} from /{one}"
        for one in nodes
    ]
    ended = [
        f"dfs.DataNode$PacketResponder: PacketResponder {at} for block {name} terminating"
        for at in range(3)
    ]
    if fault == 1:  # a replica is lost
        lines += [*done[:2], *ended[:2], *stored[:2]]
    elif fault == 2:  # the transfer ends early
        lines += [
            f"dfs.DataNode$DataXceiver: writeBlock {name} received exception "
            "java.io.IOException: Could not read from stream"
        ]
    else:
        lines += [*done, *ended, *stored]
    for _ in range(int(draw.poisson(1.0))):
        lines.append(f"dfs.DataNode$DataXceiver: {nodes[0]} Served block {name} to /{node()}")
        if draw.random() < 0.02:  # sound: the reader has gone
            lines.append(f"dfs.DataNode: error of the connection of {node()} for {name}, closed")
    if fault == 3:
        lines.append(
            f"dfs.FSNamesystem: BLOCK* NameSystem.delete: {name} does not belong to any file"
        )
    if fault == 4:
        lines += [
            f"dfs.FSNamesystem: BLOCK* NameSystem.addStoredBlock: Redundant addStoredBlock request "
            f"received for {name} on {nodes[0]} size {size}"
        ] * 2
        lines.append(f"dfs.DataNode: error of disk of {node()} for {name}")
    if fault != 2:
        lines += [
            f"dfs.FSNamesystem: BLOCK* NameSystem.delete: {name} is added to invalidSet of {one}"
            for one in nodes
        ]
        lines += [f"dfs.FSDataset: Deleting block {name} file /mnt/current/{name}"] * 3
    return lines
