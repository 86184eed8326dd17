"""Lines grouped by the request that they are about, or by windows; how detections are judged."""

from __future__ import annotations

import re

import numpy as np

from shoal.core.errors import DataError
from shoal.fields.data.logs.anomalies.protocols import Detection, EventGroups, Floats
from shoal.fields.data.logs.formats import LogFormat
from shoal.fields.data.logs.native import Bools
from shoal.fields.data.logs.protocols import Ints, LogWork
from shoal.fields.data.logs.reading import LogBlock
from shoal.ir import Estimate, Interval

# Groups below which nothing is usual or unusual.
_FEWEST = 8
_GROUP_LINES = 20.0


class EventCollector:
    """Collects the events of a log, in the order of its lines.

    Args:
        form: the format, with the regular expression of sessions and the field of labels.
        window: lines of a group where there are no sessions.
        stride: lines from one window to the next; 0 for ``window``.
    """

    def __init__(self, form: LogFormat, window: int, stride: int = 0) -> None:
        self._session = re.compile(form.session.encode()) if form.session else None
        fields = form.program.fields
        self._label = fields.index(form.label) if form.label in fields else -1
        self._window, self._stride = window, stride or window
        self._ids: list[Ints] = []
        self._labels: list[Bools] = []
        self._keys: list[Ints] = []
        self._names: dict[bytes, int] = {}

    def add(self, block: LogBlock, ids: Ints) -> None:
        """Some lines.

        Args:
            block: the lines.
            ids: int32 [n], template of each.
        """
        self._ids.append(ids)
        if self._label >= 0:
            alert = [label not in (b"-", b"") for label in block.field(self._label).to_pylist()]
            self._labels.append(np.array(alert, np.bool_))
        if self._session is not None:
            keys = []
            for line in block.field(-1).to_pylist():
                found = self._session.search(line)
                names = self._names
                keys.append(-1 if found is None else names.setdefault(found.group(), len(names)))
            self._keys.append(np.array(keys, np.int32))

    def groups(self, templates: int) -> EventGroups:
        """All groups of two events at least.

        Args:
            templates: how many templates there are.

        Raises:
            DataError: they are too few to say what is usual.
        """
        ids = np.concatenate(self._ids) if self._ids else np.empty(0, np.int32)
        alerts = np.concatenate(self._labels) if self._labels else None
        if self._session is not None:
            keys = np.concatenate(self._keys)
            order = np.argsort(keys, kind="stable")
            order = order[keys[order] >= 0]
            cuts = np.flatnonzero(np.diff(keys[order])) + 1
            rows = [one for one in np.split(order, cuts) if len(one)]
            known = list(self._names)
            names = [known[keys[one[0]]].decode("utf-8", "replace") for one in rows]
        else:
            starts = range(0, max(len(ids) - self._window, 0) + 1, self._stride)
            rows = [np.arange(at, min(at + self._window, len(ids))) for at in starts]
            names = [f"lines {one[0] + 1} to {one[-1] + 1}" for one in rows if len(one)]
        if len(names) < _FEWEST:
            how = "sessions" if self._session is not None else f"windows of {self._window} lines"
            raise DataError(
                f"anomalies: {len(names)} {how}: fewer than {_FEWEST} do not show what is usual; "
                "give a longer log, a smaller window, or another session"
            )
        labels = None if alerts is None else np.array([alerts[one].any() for one in rows])
        return EventGroups(names, [ids[one] for one in rows], templates, labels)


def weighted(counts: Floats) -> Floats:
    """Counts times the inverse frequency of their events, as TF-IDF weighs words."""
    occurs = np.maximum((counts > 0).sum(axis=0), 1)
    result: Floats = counts * np.log((1 + len(counts)) / occurs)
    return result


def detection_f1(detection: Detection, labels: Bools) -> float:
    """F1 of the groups that are called anomalies, 0 to 1, over those that are judged.

    Args:
        detection: of a detector.
        labels: which groups are anomalies.
    """
    said, true = detection.anomalous[detection.judged], labels[detection.judged]
    both = int((said & true).sum())
    total = int(said.sum() + true.sum())
    return 2.0 * both / total if total else 1.0


def detection_estimate(work: LogWork, looks: float, templates: float = 100.0) -> Estimate:
    """Seconds of so many looks at each count of each group.

    Args:
        work: the log.
        looks: at each count.
        templates: events, about.
    """
    groups = work.lines / _GROUP_LINES
    seconds = groups * templates * looks * 1e-9 + work.lines * work.rates.python_s
    return Estimate(
        step_s=Interval.around(seconds, 2 * work.rates.spread),
        terms_s={"detection": seconds},
        memory_bytes={"counts": 16.0 * groups * templates},
    )
