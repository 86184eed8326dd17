"""Detectors of anomalies: faults that are put into sessions, and what each cannot be asked."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from shoal.core.errors import DataError
from shoal.core.parts import table
from shoal.fields.data.logs.anomalies.groups import EventCollector, detection_f1
from shoal.fields.data.logs.anomalies.invariants import InvariantMining
from shoal.fields.data.logs.anomalies.pca import q_statistic
from shoal.fields.data.logs.anomalies.protocols import Detection, EventGroups
from shoal.fields.data.logs.formats import LogFormat
from shoal.fields.data.logs.reading import block_of

WITHOUT_TORCH = ["pca", "invariants", "clusters"]


def sessions(n: int = 400, faults: int = 12, labelled: bool = True) -> EventGroups:
    """Open, some of read and write, close; a fault never closes, or closes before it opens."""
    draw = np.random.default_rng(0)
    rows, labels = [], []
    for at in range(n):
        middle = [1, 2] * int(draw.integers(1, 6))
        row = [0, *middle, 3]
        if at % (n // faults) == 5:
            row = [0, *middle, 4, 4] if at % 2 else [0, *middle]
        rows.append(np.array(row, np.int32))
        labels.append(at % (n // faults) == 5)
    return EventGroups(
        [str(at) for at in range(n)], rows, 5, np.array(labels) if labelled else None
    )


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_faults_are_found(name: str) -> None:
    groups = sessions(labelled=False)
    result = table("anomaly_detector").build(name).detect(groups, 0)
    labels = sessions().labels
    assert labels is not None
    assert detection_f1(result, labels) > 0.8
    assert result.scores[labels].min() > np.median(result.scores)
    again = table("anomaly_detector").build(name).detect(groups, 0)
    assert np.array_equal(again.scores, result.scores)


def test_logistic_learns_from_labels() -> None:
    pytest.importorskip("sklearn")
    groups = sessions()
    detector = table("anomaly_detector").build("logistic")
    result = detector.detect(groups, 0)
    assert groups.labels is not None
    assert detection_f1(result, groups.labels) > 0.9
    assert result.judged.sum() == 200
    with pytest.raises(DataError, match="no labels"):
        detector.detect(sessions(labelled=False), 0)
    with pytest.raises(DataError, match="are alike"):
        detector.detect(groups._replace(labels=np.zeros(400, np.bool_)), 0)


@pytest.mark.slow
def test_next_event_knows_the_order() -> None:
    """Counts are the same in all sessions; only the order tells."""
    torch = pytest.importorskip("torch")
    before = torch.get_rng_state()
    rows = [np.array([0, 1, 2, 3], np.int32)] * 195 + [np.array([3, 1, 0, 2], np.int32)] * 5
    groups = EventGroups([str(at) for at in range(200)], rows, 4, None)
    labels = np.arange(200) >= 195
    detector = table("anomaly_detector").build({"name": "next_event", "top": 1, "epochs": 60})
    result = detector.detect(groups, 1)
    assert detection_f1(result, labels) > 0.9
    assert torch.equal(before, torch.get_rng_state())
    pca = table("anomaly_detector").build("pca").detect(groups, 0)
    assert not pca.anomalous.any()


def test_invariants_by_hand() -> None:
    """As many closed as opened, twice as many reads as writes, and opens are reads plus others."""
    rows = np.array([[1, 1, 2, 1, 0], [3, 3, 4, 2, 1], [2, 2, 2, 1, 1]], float)
    mined = {tuple(one) for one in InvariantMining().mined(rows, np.array([50.0, 30.0, 20.0]))}
    assert (1, -1, 0, 0, 0) in mined or (-1, 1, 0, 0, 0) in mined
    assert any(one[2] and one[3] and abs(one[2]) * 2 == abs(one[3]) for one in mined)
    assert all((rows @ np.array(one) == 0).all() for one in mined)


def test_the_q_statistic_is_exceeded_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    values = np.array([3.0, 2.0, 1.0, 0.5, 0.2])
    errors = (draw.normal(size=(200_000, 5)) ** 2 * values).sum(axis=1)
    assert (errors > q_statistic(values, 0.01)).mean() == pytest.approx(0.01, rel=0.3)
    assert q_statistic(np.zeros(2), 0.01) > 0


def test_f1_by_hand() -> None:
    said, true = np.array([1, 1, 0, 0, 1], bool), np.array([1, 0, 1, 0, 0], bool)
    judged = np.array([1, 1, 1, 1, 0], bool)
    assert detection_f1(Detection(said * 1.0, said, judged), true) == pytest.approx(2 / 4)


def collected(form: LogFormat, text: bytes, window: int = 4, stride: int = 0) -> EventCollector:
    collector = EventCollector(form, window, stride)
    for part in (text[: len(text) // 2], text[len(text) // 2 :]):
        block = block_of(part, form)
        collector.add(block, np.zeros(len(block.ok), np.int32))
    return collector


def test_lines_are_grouped_by_session_window_and_label() -> None:
    form = LogFormat("own", "<Label> <Content>", session=r"id\d+", label="Label")
    text = b"".join(b"%s see id%d now\n" % (b"E" if at == 7 else b"-", at % 10) for at in range(40))
    groups = collected(form, text).groups(1)
    assert groups.names == [f"id{at}" for at in range(10)]
    assert [len(one) for one in groups.sequences] == [4] * 10
    assert groups.labels is not None
    assert groups.labels.tolist() == [at == 7 for at in range(10)]
    windows = collected(LogFormat("own", "<Content>"), text, window=8, stride=4).groups(1)
    assert windows.names[:2] == ["lines 1 to 8", "lines 5 to 12"]
    assert len(windows.names) == 9
    assert windows.labels is None
    with pytest.raises(DataError, match="fewer than 8"):
        collected(LogFormat("own", "<Content>"), text, window=40).groups(1)
