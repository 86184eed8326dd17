"""What scoring costs: the rates of a machine, and the estimate that the scorers share.

How long a multiply-add of small networks, a number of k-means and a byte of hashed text take is
timed here in about a second, and kept in ``pruning.json`` of Shoal's home for this processor; for a
machine that is only described it follows from its peak rate.
"""

from __future__ import annotations

from shoal.core.native import cpu_model
from shoal.core.random import generator
from shoal.fields.data.prune.protocols import PruneRates, ScoreWork
from shoal.fields.rates import kept_rates, least_seconds
from shoal.ir import Estimate, Interval, Machine

# Half-widths: of a sum of timed rates on a shared machine, and of derived ones.
_SPREAD_TIMED, _SPREAD_DERIVED = 0.6, 3.0
# Shares of a core's peak that small products reach, and bytes of text that a core hashes.
_OF_FLOPS, _HASHED = 0.1, 4e6


def score_estimate(
    work: ScoreWork, *, macs: float = 0.0, numbers: float = 0.0, held: float = 0.0
) -> Estimate:
    """Seconds and bytes of scoring.

    Args:
        work: what is scored.
        macs: multiply-adds of small networks.
        numbers: numbers of vectors that are held against those of centroids.
        held: bytes beside the vectors.
    """
    terms = {"training": macs * work.rates.mac_s, "distances": numbers * work.rates.distance_s}
    return Estimate(
        step_s=Interval.around(sum(terms.values()) + 1e-3, work.rates.spread),
        terms_s={"fixed": 1e-3, **{name: seconds for name, seconds in terms.items() if seconds}},
        memory_bytes={"vectors": 8.0 * work.rows * work.dim, "scoring": held},
        bound="compute",
    )


def prune_rates(machine: Machine) -> PruneRates:
    """How fast a machine is: timed if it is this one, else derived from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") == cpu_model():
        return kept_rates("pruning.json", cpu_model(), PruneRates, timed)
    cores = max(machine.device.num_cores or 1, 1)
    flops = machine.device.peak_flops.get("fp32", 1e11) / cores
    if machine.device.kind == "gpu":  # its host is not described; a core of a server
        flops = 5e10
    return PruneRates(
        mac_s=2 / (_OF_FLOPS * flops),
        distance_s=2 / (_OF_FLOPS * flops),
        ngram_s=1 / _HASHED,
        spread=_SPREAD_DERIVED,
        measured=False,
    )


def timed() -> PruneRates:
    """Time the three rates on this machine, for about a second."""
    from shoal.corpora.stdlib import Stdlib
    from shoal.fields.data.prune.examples import hashed
    from shoal.fields.data.prune.scorers.networks import SmallNetworks, training_macs
    from shoal.fields.data.prune.scorers.prototypes import centroids

    draw = generator(0, purpose="pruning rates")
    X, y = draw.standard_normal((2000, 64)).astype("float32"), draw.integers(0, 10, 2000)
    networks = SmallNetworks(10, 64, 10)
    steps = 30
    training = least_seconds(lambda: networks.train(X, y, steps=steps))[0]
    middles = least_seconds(lambda: centroids(X, 10, 0))[0]
    texts = [one.text for one, _ in zip(Stdlib().documents(), range(20), strict=False)]
    hashing = least_seconds(lambda: hashed(texts))[0]
    return PruneRates(
        mac_s=training / training_macs(10, steps, 0, 64, 10),
        distance_s=middles / (10 * 60.0 * X.size),
        ngram_s=hashing / sum(map(len, texts)),
        spread=_SPREAD_TIMED,
        measured=True,
    )
