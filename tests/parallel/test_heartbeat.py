from pathlib import Path

from shoal.parallel.comm.heartbeat import Heartbeat, HeartbeatReading, blame


def test_a_reader_sees_what_the_rank_wrote(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.beat"
    assert Heartbeat.read(path, 3) is None
    heart = Heartbeat(path, 3)
    assert Heartbeat.read(path, 3).step == -1  # type: ignore[union-attr]
    heart.step(7)
    heart.enter()
    beat = Heartbeat.read(path, 3)
    assert beat is not None
    assert (beat.rank, beat.step, beat.collective, beat.inside) == (3, 7, 1, True)
    heart.leave()
    heart.enter("all_reduce")
    heart.leave()
    beat = Heartbeat.read(path, 3)
    assert beat is not None
    assert (beat.collective, beat.inside, beat.op) == (2, False, "all_reduce")


def test_the_one_that_the_others_wait_for_is_blamed() -> None:
    waiting = [HeartbeatReading(0, 5, 12, True, 9.0), HeartbeatReading(2, 5, 12, True, 9.0)]
    assert blame([*waiting, HeartbeatReading(1, 5, 11, False, 9.0)]).rank == 1, (
        "behind in collectives"
    )
    assert blame([*waiting, HeartbeatReading(1, 5, 12, False, 9.0)]).rank == 1, (
        "left it, never came back"
    )
    assert blame([*waiting, HeartbeatReading(1, 5, 12, True, 20.0)]).rank == 1, "silent for longest"


def test_a_torn_file_is_no_beat(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.beat"
    path.write_bytes(b"short")
    assert Heartbeat.read(path, 0) is None
