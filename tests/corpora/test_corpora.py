"""The table, the standard library, and what all corpora share."""

from __future__ import annotations

import json
import operator
import subprocess
import sys

import pytest

from shoal.core.errors import ConfigError, DataError, UnknownKeyError, UnknownPartError
from shoal.corpora import CORPORA, PACKINGS
from shoal.corpora.protocols import Corpus, Packing, is_heldout
from shoal.corpora.stdlib import Stdlib
from shoal.ir import Device, Machine, MemoryTier, ModelShape, TrainJob, Work


def test_the_door_is_light() -> None:
    code = (
        "import sys; from shoal.corpora import CORPORA, PACKINGS\n"
        "for t in (CORPORA, PACKINGS):\n"
        "    for n in t: t.load(n)\n"
        "heavy = {'torch', 'pyarrow', 'tokenizers', 'fsspec', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_stdlib_split_is_an_exact_partition() -> None:
    both = [(d.name, d.split, len(d.text)) for d in Stdlib().documents()]
    train = [(d.name, d.split, len(d.text)) for d in Stdlib().documents("train")]
    heldout = [(d.name, d.split, len(d.text)) for d in Stdlib().documents("heldout")]
    names = [name for name, _, _ in both]
    assert sorted(train + heldout) == both
    assert len(set(names)) == len(names) and names == sorted(names)
    assert {name for name, _, _ in heldout} == {name for name in names if is_heldout(name)}
    assert not any("site-packages" in name for name in names)
    assert "json/decoder.py" in names


def test_heldout_rule() -> None:
    # sha256 of these names, by the definition: digest as a number modulo 20.
    assert is_heldout("row#41", 1)
    share = sum(is_heldout(f"file{n}") for n in range(4000)) / 4000
    assert 0.035 < share < 0.065


def test_stdlib_without_source(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(DataError, match=r"no \*\.py file below .* give your own text"):
        list(Stdlib().documents())


@pytest.mark.parametrize("kind", ["records", "logs", "arithmetic"])
def test_synthetic_text_follows_from_the_seed_and_from_itself(kind: str) -> None:
    corpus = CORPORA.build({"name": "synthetic", "kind": kind, "size_bytes": 60_000})
    result = list(corpus.documents())
    assert result == list(corpus.documents())
    size = sum(len(document.text) for document in result)
    assert 60_000 <= size < 60_000 + len(result[-1].text) + 1
    assert len({document.text for document in result}) == len(result)
    assert {document.name for document in result if document.split == "heldout"} == {
        document.name for document in result if is_heldout(document.name)
    }
    assert list(corpus.documents("train")) == [d for d in result if d.split == "train"]
    other = CORPORA.build({"name": "synthetic", "kind": kind, "size_bytes": 60_000, "seed": 1})
    assert next(other.documents()).text != result[0].text
    assert other.fingerprint() != corpus.fingerprint()
    # What can be checked in it is right.
    for document in result:
        lines = document.text.splitlines()
        if kind == "records":
            for record in map(json.loads, lines):
                assert record["total"] == record["price"] * record["count"]
        elif kind == "arithmetic":
            for line in lines:
                left, equals, right = line.strip().partition(" = ")
                if equals:
                    one, sign, two = left.split()
                    made = {"+": operator.add, "*": operator.mul, "-": operator.sub}[sign]
                    assert made(int(one), int(two)) == int(right), line
        else:
            numbers = [int(line.split("request ")[1].split(":")[0]) for line in lines]
            assert numbers == sorted(numbers)


def test_mixed_takes_its_share_of_each_source() -> None:
    sources = {
        "notes": {"name": "synthetic", "kind": "logs", "size_bytes": 40_000},
        "sums": {"name": "synthetic", "kind": "arithmetic", "size_bytes": 40_000},
    }
    whole = CORPORA.build({"name": "mixed", "sources": sources})
    every = list(whole.documents())
    assert every[-1].name.startswith("sums/arithmetic/0-")
    assert whole.num_bytes() == 80_000
    part = CORPORA.build({"name": "mixed", "sources": sources, "limit_bytes": {"notes": 10_000}})
    some = list(part.documents())
    assert set(some) < set(every)
    sizes = {
        source: sum(len(d.text) for d in some if d.name.startswith(source)) for source in sources
    }
    assert abs(sizes["notes"] - 10_000) < 5_000 and sizes["sums"] >= 40_000
    # Spread over the source, and each split is the same whoever asks.
    notes = [d for d in every if d.name.startswith("notes")]
    assert {d for d in some if d.name.startswith("notes")} & set(notes[len(notes) // 2 :])
    assert [*part.documents("train"), *part.documents("heldout")] != some  # they alternate
    assert set(part.documents("train")) | set(part.documents("heldout")) == set(some)
    assert part.fingerprint() != whole.fingerprint()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "mixed", "sources": {}}, "at least one corpus"),
        ({"name": "mixed", "sources": {"a/b": "stdlib"}}, "names without /"),
        (
            {"name": "mixed", "sources": {"a": "stdlib"}, "limit_bytes": {"b": 1}},
            "at least 1 byte of one of a",
        ),
        ({"name": "synthetic", "size_bytes": 0}, "size_bytes = 0"),
        ({"name": "synthetic", "heldout_every": 1}, "at least 2"),
        ({"name": "synthetic", "kind": "poems"}, "kind"),
    ],
)
def test_synthetic_and_mixed_refuse(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CORPORA.build(options)


def _work() -> tuple[Work, Machine]:
    shape = ModelShape(
        name="m", num_layers=1, hidden=8, num_heads=1, num_kv_heads=1, head_dim=8,
        ffn_hidden=8, vocab_size=300,
    )  # fmt: skip
    memory = (MemoryTier(name="dram", capacity_bytes=2**30, read_bandwidth=1e10),)
    machine = Machine(name="c", device=Device(name="cpu", kind="cpu", memory=memory))
    return Work(shape=shape, job=TrainJob(steps=1)), machine


@pytest.mark.parametrize(
    "part",
    [
        *(CORPORA.build({"name": n, "path": "x"}) for n in ("text", "jsonl", "parquet", "chat")),
        Stdlib(),
        *(PACKINGS.build(n) for n in PACKINGS),
    ],
    ids=lambda p: type(p).__name__,
)
def test_parts_say_what_they_cost_and_spell_themselves(part: object) -> None:
    work, machine = _work()
    table = CORPORA if isinstance(part, Corpus) else PACKINGS
    assert isinstance(part, Corpus | Packing)
    estimate = part.estimate(work, machine)
    assert estimate.terms_s["data"] == estimate.step_s.value
    assert 0 < estimate.step_s.value < 0.01
    wider = work.job.model_copy(update={"seq_len": 4096})
    assert part.estimate(Work(shape=work.shape, job=wider), machine).step_s.value > (
        estimate.step_s.value
    )
    assert table.build(table.spell(part)) == part


@pytest.mark.parametrize(
    ("choice", "error", "words"),
    [
        ("stdlb", UnknownPartError, "did you mean 'stdlib'"),
        ({"name": "text"}, ConfigError, r"corpus\.text\.path: missing"),
        ({"name": "text", "path": " "}, ConfigError, "a file or directory"),
        ({"name": "text", "path": "x", "heldout_every": 1}, ConfigError, "at least 2"),
        ({"name": "jsonl", "path": "x", "field": ""}, ConfigError, "name of a key"),
        ({"name": "parquet", "path": "x", "column": ""}, ConfigError, "column's name"),
        ({"name": "jsonl", "path": "x", "feild": "t"}, UnknownKeyError, "did you mean 'field'"),
    ],
)
def test_wrong_options(choice: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        CORPORA.build(choice)  # type: ignore[arg-type]
