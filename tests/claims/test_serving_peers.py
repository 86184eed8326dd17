"""Engines beside each other: processes that rest, tokens that count, failures that are told."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from shoal.claims.bench.serving import run
from shoal.claims.bench.serving.drivers import loop
from shoal.claims.bench.serving.peers import PeerEngine, known
from shoal.claims.bench.serving.values import EngineResult, ServingCase, ServingPeer, ServingTable
from shoal.core.errors import ConfigError, ServeError

DRIVER = """
import sys
sys.path.insert(0, {drivers!r})
from loop import Loaded, main

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

    return Loaded(generate, "7", "as it is", "int2")

main(load)
"""


@pytest.fixture
def peer(tmp_path: Path) -> ServingPeer:
    drivers = Path(run.__file__).parent / "drivers"
    (tmp_path / "of_fake.py").write_text(DRIVER.format(drivers=str(drivers)))
    return ServingPeer(name="fake", driver=str(tmp_path / "of_fake"), python=sys.executable)


def test_an_engine_answers_while_it_is_asked_and_rests_otherwise(peer):
    with PeerEngine(peer, {"form": "bf16"}) as engine:
        assert (engine.version, engine.settings, engine.weights) == ("7", "as it is", "int2")
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
    for name in ("llama.cpp", "vllm", "openvino-genai", "onnxruntime-genai"):
        assert name not in peers
        assert "scripts/peers" in missing[name]
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


def test_half_a_converted_directory_is_never_there(tmp_path):
    target, calls = tmp_path / "model-int8", []

    def write(place: Path) -> None:
        calls.append(sorted(file.name for file in place.iterdir()))
        (place / "half").touch()
        if len(calls) == 1:
            raise ValueError("disk full")
        (place / "rest").touch()

    with pytest.raises(ValueError, match="disk full"):
        loop.made(target, write)
    assert not target.exists()
    for _ in range(2):
        assert loop.made(target, write) == target
    # The first rest is cleared, and what is there is not written again.
    assert calls == [[], []]
    assert sorted(file.name for file in target.iterdir()) == ["half", "rest"]


def test_what_an_engine_lacks_is_said_not_asked(tmp_path, monkeypatch):
    """Without loading it: its Python would fail."""
    lacking = ServingPeer(name="odd", driver="none", python="/none", lacks={"int8": "no int8 here"})
    own = ServingPeer(name="shoal", driver="none", python="/none", lacks={"int8": "nor here"})
    monkeypatch.setattr(run, "known", lambda _: ({"shoal": own, "odd": lacking}, {}))
    monkeypatch.setattr(run, "_case", lambda *_: ([], {}))
    model = tiny(tmp_path)
    cases = [ServingCase(name="few", requests=1, prompt=4, new=2, forms=("int8",))]
    table = run.bench(model, cases=cases, rounds=1)
    assert table.missing == {"odd, int8": "no int8 here", "shoal, int8": "nor here"}
    assert run.notes(table) == [
        "shoal, int8: left out: nor here",
        "odd, int8: left out: no int8 here",
    ]


def test_rows_and_notes_say_what_was_not_as_asked():
    entry = EngineResult(
        case="prefill, 1,024 tokens",
        form="bf16",
        engine="onnxruntime-genai",
        seconds=(2.0,),
        tokens=10,
        agreement=1.0,
        equal=0.75,
        weights="fp32",
    )
    own = entry.model_copy(update={"engine": "shoal", "equal": 0.5, "weights": ""})
    table = ServingTable(
        model="m",
        threads=2,
        versions={},
        settings={"onnxruntime-genai, bf16": "computes in fp32"},
        missing={"vllm, int4": "no"},
        entries=(own, entry),
    )
    cells = run.rows(table)[1]
    assert cells[1:3] == ("bf16 as fp32", "onnxruntime-genai")
    assert cells[6] == ">= 1x: yes"
    assert run.notes(table) == [
        "tokens equal to those of transformers, mean of the cases: shoal 50 %, "
        "onnxruntime-genai 75 %",
        "onnxruntime-genai, bf16: computes in fp32",
        "vllm, int4: left out: no",
    ]


def tiny(place: Path) -> Path:
    """A model whose best tokens lie far apart.

    No layer is as wide as the vocabulary: ONNX Runtime's builder takes such a one for the head.
    """
    size = {"hidden": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    update = {**size, "ffn_hidden": 384, "vocab_size": 256, "initializer_range": 0.2}
    return run.random_directory(place, run.SHAPE.model_copy(update=update))


@pytest.fixture(params=["openvino-genai", "onnxruntime-genai"])
def other(request: pytest.FixtureRequest) -> ServingPeer:
    """An engine of an environment that scripts/peers made."""
    place = os.environ.get("SHOAL_PEERS")
    if place is None:
        pytest.skip("SHOAL_PEERS names no directory that scripts/peers made")
    peers, missing = known(Path(place))
    if request.param not in peers:
        pytest.skip(missing[request.param])
    return peers[request.param]


def options(model: Path, scratch: Path, form: str) -> dict[str, object]:
    sizes = {"threads": 2, "kv_tokens": 1024, "max_running": 8, "max_position": 256}
    return {"model": str(model), "form": form, "scratch": str(scratch), **sizes}


# A token of the engine is the model's best in fp32, or one whose logit is as near to that of the
# best as rounding explains; in shares of the range of the logits.
@pytest.mark.slow
@pytest.mark.parametrize(("form", "error"), [("bf16", 0.03), ("int8", 0.1), ("int4", 0.4)])
def test_an_engine_in_its_environment_chooses_the_best_tokens(tmp_path, other, form, error):
    transformers = pytest.importorskip("transformers")
    model = tiny(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # Lengths differ, and 0 is a token as others.
    prompts = [[7, 0, 255], [3] * 40 + [0], [200, 1, 5, 9, 0, 0, 8], list(range(90))]
    new = [12, 3, 20, 7]
    with PeerEngine(other, options(model, tmp_path, form)) as engine:
        assert engine.settings
        assert engine.weights != form
        seconds, tokens = engine.generate(prompts, new)
        assert seconds > 0
        assert [
            engine.generate([p], [n])[1][0] for p, n in zip(prompts, new, strict=True)
        ] == tokens
    for prompt, answer in zip(prompts, tokens, strict=True):
        ids = torch.tensor([prompt + answer])
        with torch.inference_mode():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        # The end token, 255, may be left out.
        best, worst = logits[:, :255].max(dim=1).values, logits.min(dim=1).values
        chosen = logits[torch.arange(len(answer)), torch.tensor(answer)]
        assert ((best - chosen) / (best - worst)).max() <= error


@pytest.mark.slow
def test_an_engine_refuses_what_it_cannot_load(tmp_path, other):
    with pytest.raises(ServeError, match=f"{other.name}: ValueError: form fp7: expected bf16"):
        PeerEngine(other, options(tiny(tmp_path), tmp_path, "fp7"))
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    with pytest.raises(ServeError, match=rf"{other.name}: .*config\.json"):
        PeerEngine(other, options(nothing, tmp_path, "bf16"))
    assert not [*tmp_path.glob("openvino-*[!t]"), *tmp_path.glob("onnx-*[!t]")]


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
