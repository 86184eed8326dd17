"""Engines beside each other: processes that rest, tokens that count, failures that are told."""

import json
import sys
from pathlib import Path

import pytest

from shoal.claims.bench.serving import run
from shoal.claims.bench.serving.peers import PeerEngine, known
from shoal.claims.bench.serving.values import EngineResult, ServingCase, ServingPeer, ServingTable
from shoal.core.errors import ConfigError, ServeError

DRIVER = """
import sys
sys.path.insert(0, {drivers!r})
from loop import main

def load(options):
    if options["form"] == "int8":
        raise ValueError("no int8 here")
    print("libraries talk")
    served = 0

    def generate(prompts, new):
        nonlocal served
        served += 1
        if options["form"] == "int4" and served > 1:
            raise RuntimeError("out of luck")
        short = options["form"] == "short"
        return [[len(p)] * (n - short) for p, n in zip(prompts, new)]

    return generate, "7"

main(load)
"""


@pytest.fixture
def peer(tmp_path: Path) -> ServingPeer:
    drivers = Path(run.__file__).parent / "drivers"
    (tmp_path / "of_fake.py").write_text(DRIVER.format(drivers=str(drivers)))
    return ServingPeer(name="fake", driver=str(tmp_path / "of_fake"), python=sys.executable)


def test_an_engine_answers_while_it_is_asked_and_rests_otherwise(peer):
    with PeerEngine(peer, {"form": "bf16"}) as engine:
        assert engine.version == "7"
        state = Path(f"/proc/{engine._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        assert state == "T"
        seconds, tokens = engine.generate([[1, 2], [3]], [2, 1])
        assert seconds > 0
        assert tokens == [[2, 2], [1]]
        assert "libraries talk" in engine.said()
    assert engine._process.returncode is not None


def test_what_fails_is_told(peer):
    with pytest.raises(ServeError, match="fake: ValueError: no int8 here"):
        PeerEngine(peer, {"form": "int8"})
    with (
        PeerEngine(peer, {"form": "short"}) as engine,
        pytest.raises(ServeError, match=r"\[0\] new tokens: expected \[1\]"),
    ):
        engine.generate([[1]], [1])
    with PeerEngine(peer, {"form": "int4"}) as engine:
        engine.generate([[1]], [1])
        with pytest.raises(ServeError, match="out of luck"):
            engine.generate([[1]], [1])


def test_an_engine_that_dies_says_its_last_words(tmp_path):
    (tmp_path / "dead.py").write_text("import sys; print('no such library', file=sys.stderr)")
    dead = ServingPeer(name="dead", driver=str(tmp_path / "dead"), python=sys.executable)
    with pytest.raises(ServeError, match="no such library"):
        PeerEngine(dead, {})


def test_peers_without_an_environment_have_a_reason(tmp_path):
    peers, missing = known(tmp_path)
    assert "shoal" in peers
    assert "scripts/peers" in missing["llama.cpp"]
    with pytest.raises(ConfigError, match="expected one of"):
        run.bench(tmp_path, only=["lama"])


def test_lengths_are_the_same_for_all():
    case = ServingCase(name="mixed", requests=50, prompt=80, new=20, spread=0.8)
    prompts, new = run.lengths(case, 3)
    assert (prompts, new) == run.lengths(case, 3)
    assert len(set(prompts)) > 10
    assert all(8 <= n <= 120 for n in new)


def test_ratios_are_of_the_same_round():
    def entry(engine: str, *seconds: float) -> EngineResult:
        return EngineResult(
            case="decode, batch 1",
            form="bf16",
            engine=engine,
            seconds=seconds,
            tokens=10,
            agreement=1.0,
        )

    table = ServingTable(
        model="m",
        threads=2,
        versions={},
        entries=(entry("shoal", 1.0, 2.0, 4.0), entry("llama.cpp", 2.0, 4.0, 2.0)),
    )
    ratio = table.ratio("decode, batch 1", "bf16", "llama.cpp")
    assert ratio is not None
    assert ratio.value == 2.0
    assert table.ratio("decode, batch 1", "bf16", "vllm") is None
    assert run.rows(table)[1][4:] == ("2.00x", "0.50 .. 2.00", ">= 1.1x: yes", "100 %")
    assert ServingTable.model_validate(json.loads(table.model_dump_json())) == table


@pytest.mark.slow
def test_shoal_beside_transformers(tmp_path):
    """Really: the same bytes, the same prompts, the same first tokens."""
    pytest.importorskip("transformers")
    tiny = {"hidden": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    config = run.SHAPE.model_copy(update={**tiny, "ffn_hidden": 128, "vocab_size": 256})
    model = run.random_directory(tmp_path, config)
    cases = [ServingCase(name="few", requests=2, prompt=12, new=4, what="decode")]
    table = run.bench(model, only=["transformers"], cases=cases, rounds=1, threads=1)
    assert {entry.engine for entry in table.entries} == {"shoal", "transformers"}
    assert all(len(entry.seconds) == 1 and entry.tokens == 8 for entry in table.entries)
    assert all(entry.agreement == 1.0 for entry in table.entries)
