"""The integer constraint solver against brute force, and what it says when there is no answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, PlanError
from shoal.plan.constrint.solve import UnsatisfiableError, brute_force, parse, solve
from shoal.plan.constrint.tiles import Facts, LinearShape, RecurrenceShape, tiling

NAMES = ("a", "b", "c")


@st.composite
def domains(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["interval", "values", "factor", "primes"]))
    if kind == "values":
        values = draw(st.lists(st.integers(-9, 20), min_size=1, max_size=6))
        return "{" + ", ".join(map(str, values)) + "}"
    if kind == "primes":
        return f"1..{draw(st.integers(1, 14))} primes {{2, 3}}"
    low = draw(st.integers(-8, 8))
    high = low + draw(st.integers(0, 7))
    return f"{low}..{high}" if kind == "interval" else f"{low - 3}..{high + 3} % 3"


@st.composite
def expressions(draw: st.DrawFn, depth: int = 2) -> str:
    kind = draw(
        st.sampled_from(["name", "number"] if depth == 0 else ["name", "sum", "product", "power"])
    )
    if kind == "name":
        return draw(st.sampled_from(NAMES))
    if kind == "number":
        return str(draw(st.integers(0, 12)))
    if kind == "power":
        return f"({draw(expressions(depth=0))}) ** {draw(st.integers(1, 3))}"
    left, right = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    sign = draw(st.sampled_from("+-")) if kind == "sum" else "*"
    return f"({left}) {sign} ({right})"


@st.composite
def constraints(draw: st.DrawFn, depth: int = 1) -> str:
    if depth and draw(st.integers(0, 3)) == 0:
        left, right, more = (draw(constraints(depth=0)) for _ in range(3))
        return f"({left}; {more}) | {right}"
    left, right = draw(expressions()), draw(expressions())
    if draw(st.booleans()):
        return f"{left} % ({right}) == 0"
    return f"{left} {draw(st.sampled_from(['==', '<=', '<', '>=', '>']))} {right}"


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    boxes=st.lists(domains(), min_size=3, max_size=3),
    stated=st.lists(constraints(), min_size=1, max_size=4),
    objective=st.one_of(
        st.none(), st.tuples(st.sampled_from(["maximize", "minimize"]), expressions())
    ),
)
def test_answers_are_those_of_brute_force(
    boxes: list[str], stated: list[str], objective: tuple[str, str] | None
) -> None:
    lines = [f"{name} in {box}" for name, box in zip(NAMES, boxes, strict=True)] + stated
    lines += [" ".join(objective)] if objective else []
    system = parse(lines)
    best, _, _ = brute_force(system)
    if best is None:
        with pytest.raises(UnsatisfiableError) as caught:
            solve(lines)
        # What it names is enough to be impossible, and nothing of it is idle.
        conflict = list(caught.value.conflict)
        assert brute_force(parse([*lines[:3], *conflict]))[0] is None
        for one in set(conflict):
            rest = [other for other in conflict if other != one]
            assert brute_force(parse([*lines[:3], *rest]))[0] is not None
        return
    result = solve(lines)
    assert system.holds(result)
    assert result.objective == system.score(best)


def test_largest_values_come_first() -> None:
    result = solve("a in 1..10; b in 1..10; a * b == 24")
    assert dict(result) == {"a": 8, "b": 3}
    assert len(result) == 2


def test_divisors_are_found_without_trying() -> None:
    result = solve("tile in 1..1000000; count in 1..1000000; tile * count == 999983; tile >= 2")
    assert dict(result) == {"tile": 999983, "count": 1}
    assert result.nodes < 20


def test_primes_cut_what_equal_products_share() -> None:
    text = "a in 1..100000 primes {2}; b in 1..100000 primes {3}; a * b == c * 36; c in 1..5000"
    result = solve(text + "; c >= 1000; maximize c")
    assert (result["a"] * result["b"], result["c"]) == (36 * result["c"], 4608)
    with pytest.raises(UnsatisfiableError, match=r"no solution: this constraint cannot hold"):
        solve("a in 1..100000 primes {2}; b in 1..100000 primes {3}; a * b == 770")


def test_common_factors_are_carried() -> None:
    with pytest.raises(UnsatisfiableError) as caught:
        solve("a in 0..1000000 % 6; b in 0..1000000 % 9; a + b == 1000000")
    assert caught.value.nodes == 1
    assert solve("a in 5000..99999; b in {48, 60}; a % b == 0; a % 84 == 0; a <= 5100")["a"] == 5040


def test_unsatisfiable_names_what_conflicts_and_nothing_else() -> None:
    with pytest.raises(UnsatisfiableError) as caught:
        solve(
            """
            size = 64   # a fact
            rows in 1..8
            depth in 1..64
            idle: rows + depth >= 2
            fits: rows * depth <= 100
            whole: depth == size
            busy: rows >= 2
            """
        )
    assert caught.value.conflict == (
        "fits: rows * depth <= 100",
        "whole: depth == size",
        "busy: rows >= 2",
    )
    message = str(caught.value)
    assert message.startswith("constrint: no solution: these constraints conflict: fits:")
    assert "where depth in 1..64, rows in {1, 2, 3, 4, 5, 6, 7, 8}" in message
    assert "with size = 64" in message


def test_gives_up_only_if_asked() -> None:
    text = """
        a in 1..60; b in 1..60; c in 1..60; d in 1..60
        a ** 3 + b ** 3 == c ** 3 + d ** 3; a > c; c > b
    """
    result = solve(text)
    assert result["a"] ** 3 + result["b"] ** 3 == result["c"] ** 3 + result["d"] ** 3
    with pytest.raises(PlanError, match="no answer after 2 nodes"):
        solve(text, max_nodes=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one domain"),
        ("a in 1..4; a <= bb", r"'a <= bb': bb has no domain; write bb in LOW..HIGH"),
        ("rows in 1..4; row <= 2", r"did you mean 'rows'"),
        ("a in 4..1", r"4 .. 1 is empty"),
        ("a in 1..4; a in 1..5", "a is declared twice"),
        ("a in 1..4; a <= ", "expected more, found the end"),
        ("a in 1..4; a <= 2 2", "expected the end of the statement, found '2'"),
        ("a in 1..4; a / 2 <= 1", r"'/' is no number, name or sign"),
        ("a in 1..4; (a <= 2", r"expected '\)', found the end"),
        ("a in 1..4; a % 2 == 1", r"write a remainder r as"),
        ("a in 1..4; a ** 0 == 1", r"an exponent is 1 or more"),
        ("a in 1..4; a", "expected '==' or"),
        ("a in 5..7 % 4", "no value is like this"),
        ("a in 1..8 primes {4}", "primes has numbers that are none"),
        ("a in 1..8; maximize a; minimize a", "a second objective"),
        ("in in 1..2", "'in' cannot name a variable"),
        ("a in x..2", "expected an integer, found 'x'"),
    ],
)
def test_unreadable_systems_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


WIDE = Facts(cores=2, vector_bytes=64, registers=32, l1_bytes=49152, l2_bytes=2097152)


def test_tiling_systems_are_solved_by_looking_at_few_nodes() -> None:
    """A search without thought has leaves by the million."""
    for shape in (
        RecurrenceShape(batch=16),
        RecurrenceShape(hidden=256, heads=1, batch=16, function="slstm"),
        LinearShape(m=4, n=4096, k=11008),
    ):
        started = time.process_time()
        result = tiling(shape, WIDE)
        assert time.process_time() - started < 5
        system = parse(result.text)
        assert system.holds(result.solution)
        assert system.box > 10_000 * result.solution.nodes


def test_small_tiling_system_has_the_optimum_of_brute_force() -> None:
    result = tiling(RecurrenceShape(hidden=48, heads=3, batch=2), WIDE)
    system = parse(result.text)
    best, _, whole = brute_force(system)
    assert whole
    assert best is not None
    assert system.score(best) == result.solution.objective


def test_tiles_of_a_gpu_and_of_what_does_not_fit() -> None:
    gpu = Facts(kind="gpu", cores=132, vector_bytes=128, registers=255, l1_bytes=233472)
    result = tiling(RecurrenceShape(number_bytes=2, batch=16), gpu)
    assert result["gate_tile"] * result["gate_warps"] * result["gate_blocks"] == 256
    assert result["rec_tile"] * result["rec_warps"] == 64
    with pytest.raises(UnsatisfiableError, match=r"in_L2: gates \* units") as caught:
        tiling(RecurrenceShape(hidden=4096, heads=1), WIDE)
    assert any(one.startswith("in_L2") for one in caught.value.conflict)
    with pytest.raises(ConfigError, match=r"recurrence.hidden = 770.*nearest is 768"):
        tiling(RecurrenceShape(hidden=770), WIDE)
    with pytest.raises(ConfigError, match=r"expected the machine of a CPU"):
        tiling(LinearShape(), gpu)
