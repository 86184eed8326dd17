"""Works of clients on a pool: the same bits as in one process."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError
from shoal.fields.federate.job import FederateJob


def _model(tmp_path, name, **options):
    import shoal

    job = {
        "job": "federate", "name": name, "clients": "4", "rounds": 3, "steps": 4,
        "clock": "virtual", "speeds": "exponential", "seed": 3, **options,
    }  # fmt: skip
    shoal.run(job, machine="laptop", directory=tmp_path / name)
    return (tmp_path / name / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["local", "ray"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedbuff"])
def test_a_pool_gives_the_same_model_bit_for_bit(tmp_path, pool, algorithm):
    if pool == "ray":
        pytest.importorskip("ray")
    options = {"algorithm": algorithm, "attack": "sign_flip", "attackers": 1}
    alone = _model(tmp_path, "alone", **options)
    pooled = _model(tmp_path, "pooled", pool=pool, **options)
    # The files differ in nothing but the names of runs, which they do not have.
    assert alone == pooled


def test_a_pool_on_the_wall_clock_is_an_error():
    with pytest.raises(ConfigError, match="clock: virtual"):
        FederateJob.model_validate({"pool": "local"})
