"""Scores of parsers against cases worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.fields.data.logs.score import read_truth, scores


def test_worked_by_hand() -> None:
    """Six lines: the truth has groups {0,1,2}, {3}, {4,5}; the parser {0,1}, {2}, {3}, {4,5}."""
    result = scores(
        [0, 0, 1, 2, 3, 3],
        ["a <*>", "a x", "b", "c  <*>"],
        [0, 0, 0, 1, 2, 2],
        ["a <*>", "b", "c <*>"],
    )
    assert result.grouping_accuracy == pytest.approx(3 / 6)  # {3} and {4,5}
    assert result.parsing_accuracy == pytest.approx(5 / 6)  # all but line 2
    assert result.group_f1 == pytest.approx(2 * 2 / (4 + 3))
    assert result.template_f1 == pytest.approx(2 * 2 / (4 + 3))
    assert (result.groups, result.true_groups) == (4, 3)


def test_a_group_that_takes_one_line_too_many_is_wrong_for_all_its_lines() -> None:
    """Pairs of lines would call most of this right; grouping accuracy does not."""
    n = 100
    truth = [0] * (n - 1) + [1]
    result = scores([0] * n, ["<*>"], truth, ["a", "b"])
    assert result.grouping_accuracy == 0.0
    assert result.group_f1 == 0.0


def test_a_right_group_with_a_wrong_template_counts_for_its_group_alone() -> None:
    result = scores([0, 0, 1], ["a <*>", "b"], [1, 1, 0], ["b", "a 5"])
    assert result.grouping_accuracy == 1.0
    assert result.parsing_accuracy == pytest.approx(1 / 3)
    assert result.group_f1 == 1.0
    assert result.template_f1 == pytest.approx(0.5)


def test_numbers_of_groups_do_not_matter() -> None:
    draw = np.random.default_rng(0)
    ids, truth = draw.integers(0, 5, 60), draw.integers(0, 4, 60)
    texts, others = [str(at) for at in range(7)], [str(at) for at in range(7)]
    before = scores(ids, texts, truth, others)
    moved = np.array([3, 0, 6, 1, 2])[ids]
    back = [
        texts[np.flatnonzero(np.array([3, 0, 6, 1, 2]) == at)[0]] if at in (3, 0, 6, 1, 2) else ""
        for at in range(7)
    ]
    assert scores(moved, back, truth, others) == before


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="3 lines and a truth of 2"):
        scores([0, 0, 0], ["a"], [0, 0], ["a"])
    with pytest.raises(DataError, match="needs the columns EventId"):
        read_truth(b"a,b\n1,2\n", "x.csv")
    known = read_truth(b'LineId,EventId,EventTemplate\n1,E7,"a, <*>"\n2,E2,b\n3,E7,"a, <*>"\n', "x")
    assert known.ids.tolist() == [0, 1, 0]
    assert known.templates == ["a, <*>", "b"]
