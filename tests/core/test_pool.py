"""The pool: the same calls and the same results from local processes and from Ray."""

from __future__ import annotations

import collections
import math
import operator
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, MissingExtraError, RankError
from shoal.core.extras import import_extra
from shoal.core.pool import POOLS, Actor, Pool, PoolPart
from shoal.core.pool.local import _Outcome

# Functions sent to workers come from the standard library, so that any worker can
# import them wherever the tests lie.
TIMEOUT = 120


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"name": "local", "workers": 2}, id="local", marks=pytest.mark.multi),
        pytest.param(
            {"name": "ray", "workers": 2}, id="ray", marks=[pytest.mark.multi, pytest.mark.slow]
        ),
    ],
)
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    part = POOLS.build(request.param)
    assert isinstance(part, PoolPart)
    with part.open() as opened:
        assert isinstance(opened, Pool)
        yield opened


def test_submit_runs_in_another_process(pool: Pool) -> None:
    assert pool.submit(os.getpid).result(TIMEOUT) != os.getpid()
    assert pool.submit(int, "ff", base=16).result(TIMEOUT) == 255


def test_map_keeps_the_order(pool: Pool) -> None:
    assert list(pool.map(operator.mul, range(20), range(20))) == [n * n for n in range(20)]


def test_map_raises_the_first_error(pool: Pool) -> None:
    results = pool.map(math.sqrt, [4.0, -1.0, 9.0])
    assert next(results) == 2.0
    with pytest.raises(ValueError, match="math domain error"):
        next(results)


def test_exception_comes_back_with_its_remote_traceback(pool: Pool) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        pool.submit(operator.truediv, 1, 0).result(TIMEOUT)
    note = "\n".join(caught.value.__notes__)
    assert "Raised on pool worker" in note
    assert "Traceback (most recent call last)" in note


def test_exception_that_cannot_travel_is_told(pool: Pool) -> None:
    # MissingExtraError is built from three arguments, which its pickle does not hold.
    with pytest.raises(RankError, match=r"MissingExtraError: it needs .* pip install"):
        pool.submit(import_extra, "no_such_module", extra="run", purpose="it").result(TIMEOUT)


def test_exit_in_a_worker_is_an_error_here(pool: Pool) -> None:
    with pytest.raises(RankError, match="SystemExit: 3"):
        pool.submit(sys.exit, 3).result(TIMEOUT)


def test_dead_worker_is_named_and_replaced(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"pool worker.* died .*_exit"):
        pool.submit(os._exit, 3).result(TIMEOUT)
    assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]


def test_lambda_is_refused_here(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="cannot be sent to another process"):
        pool.submit(lambda: 1)


def test_actor_keeps_state_and_order(pool: Pool) -> None:
    actor = pool.actor(collections.Counter, ["a"])
    assert isinstance(actor, Actor)
    for letter in "abab":
        actor.call("update", [letter])
    assert actor.call("most_common").result(TIMEOUT) == [("a", 3), ("b", 2)]
    with pytest.raises(AttributeError, match="no_such_method"):
        actor.call("no_such_method").result(TIMEOUT)
    actor.close()
    with pytest.raises(RankError, match="closed"):
        actor.call("most_common")


def test_actor_whose_constructor_fails(pool: Pool) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        pool.actor(int, "x")


def test_dead_actor_fails_every_later_call(pool: Pool) -> None:
    # A list of one function: calling "sort" with that key ends the process.
    actor = pool.actor(list, [3])
    with pytest.raises(RankError, match=r"pool actor \d+ \(builtins.list\).* died .*sort"):
        actor.call("sort", key=os._exit).result(TIMEOUT)
    with pytest.raises(RankError, match="died"):
        actor.call("__len__").result(TIMEOUT)


@pytest.mark.multi
def test_local_names_the_signal() -> None:
    with POOLS.build({"name": "local", "workers": 1}).open() as pool:
        with pytest.raises(RankError, match=r"worker 0 \(process \d+\).*SIGKILL"):
            pool.submit(signal.raise_signal, signal.SIGKILL).result(TIMEOUT)
        assert pool.submit(abs, -1).result(TIMEOUT) == 1


@pytest.mark.multi
def test_local_survives_a_call_that_closes_its_pipe() -> None:
    with POOLS.build({"name": "local", "workers": 1}).open() as pool:
        with pytest.raises(RankError, match=r"worker 0 .* died .*closerange"):
            pool.submit(os.closerange, 3, 256).result(TIMEOUT)
        assert pool.submit(abs, -1).result(TIMEOUT) == 1


@pytest.mark.multi
def test_local_close_finishes_what_was_submitted() -> None:
    pool = POOLS.build({"name": "local", "workers": 2}).open()
    futures = [pool.submit(abs, -n) for n in range(10)]
    pool.close()
    assert [future.result(0) for future in futures] == list(range(10))
    with pytest.raises(RankError, match="closed"):
        pool.submit(abs, 1)


@pytest.mark.multi
def test_local_close_now_ends_what_runs() -> None:
    pool = POOLS.build({"name": "local", "workers": 1}).open()
    pool.submit(abs, 1).result(TIMEOUT)
    running = pool.submit(time.sleep, 600)
    waiting = pool.submit(abs, 1)
    while not running.running():
        time.sleep(0.01)
    pool.close(now=True)
    with pytest.raises(RankError, match=r"ended while running time\.sleep"):
        running.result(TIMEOUT)
    assert waiting.cancelled()


@pytest.mark.slow
@pytest.mark.multi
def test_local_ctrl_c_ends_everything(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, threading, time
        from shoal.core.pool import POOLS

        # A shell that puts the tests into the background has them ignore the signal.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if __name__ == "__main__":
            with POOLS.build({"name": "local", "workers": 2}).open() as pool:
                worker = pool.submit(os.getpid).result()
                # Told when the main thread waits: within CPython's own locks, a signal can find
                # one half taken.
                threading.Timer(0.5, lambda: print(worker, flush=True)).start()
                pool.submit(time.sleep, 600).result()
        """)
    )
    # A group of its own, as a terminal gives it: Ctrl-C reaches every process in it.
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert process.stdout is not None
    try:
        worker = int(process.stdout.readline())
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert errors.count("Traceback") == 1, errors
    assert "KeyboardInterrupt" in errors
    assert not Path(f"/proc/{worker}").exists()


def test_local_a_signal_that_no_wait_notices_is_found_soon() -> None:
    class InterruptError(Exception):
        pass

    def interrupted(number: int, frame: object) -> None:
        raise InterruptError

    def elsewhere() -> None:
        # In another thread than the one that waits: its lock goes on sleeping.
        time.sleep(0.02)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    old = signal.signal(signal.SIGUSR1, interrupted)
    outcome = _Outcome()
    try:
        thread = threading.Thread(target=elsewhere)
        with pytest.raises(InterruptError):
            thread.start()
            outcome.result()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, old)
    outcome.set_result(3)
    assert (outcome.result(), outcome.result(timeout=0), outcome.exception()) == (3, 3, None)


@pytest.mark.parametrize(
    "choice",
    [
        {"name": "local", "workers": -1},
        {"name": "ray", "workers": -1},
        {"name": "ray", "cpus_per_call": -1.0},
    ],
)
def test_bad_options(choice: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expected at least 0"):
        POOLS.build(choice)


def test_ray_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"shoal-ml\[cluster\]"):
        POOLS.build("ray").open()
