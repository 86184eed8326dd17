"""From a model directory to one of few bits: the command, its numbers, and what it refuses."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from typer.testing import CliRunner  # noqa: E402

from shoal.app.cli import app  # noqa: E402
from shoal.core.errors import ConfigError, KernelError, ModelError  # noqa: E402
from shoal.corpora.tokens import prepare  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.initialise import init_weights  # noqa: E402
from shoal.model.lowbit import LowBitLinear  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.train.quality import compare  # noqa: E402
from shoal.train.quantize import calibration, quantize_directory  # noqa: E402
from shoal.train.zoo import config  # noqa: E402


@pytest.fixture(scope="module")
def few(corpus, tmp_path_factory):
    """The beginnings of the corpus' documents."""
    folder = tmp_path_factory.mktemp("few")
    for path in corpus.glob("*.py"):
        (folder / path.name).write_bytes(path.read_bytes()[:4000])
    return folder


@pytest.fixture(scope="module")
def tokens(few):
    return prepare({"name": "text", "path": str(few)}, "bpe", 512)


@pytest.fixture(scope="module")
def directory(tokens, tmp_path_factory):
    """A model that knows which tokens are frequent, so that its numbers differ."""
    torch.set_num_threads(1)
    shape = config("shoal-0.3m").model_copy(update={"vocab_size": 512})
    model = Transformer(shape)
    init_weights(model, 0)
    rows = calibration(tokens.train, samples=8, length=64, vocab_size=512)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(8):
        loss = model.loss_sum(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    place = tmp_path_factory.mktemp("models") / "m"
    huggingface.write(place, model, tokens.tokenizer_path)
    return place


def test_the_command_says_what_it_costs(directory, few, tmp_path):
    out = tmp_path / "small"
    options = ["--format", "int4-g32", "--text", str(few), "--samples", "4", "--length", "64"]
    result = CliRunner().invoke(
        app,
        [
            "model",
            "quantize",
            str(directory),
            "--out",
            str(out),
            *options,
            "--eval-tokens",
            "1000",
            "--no-timing",
            "-o",
            "json",
        ],
    )
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["format"] == "int4-g32"
    assert said["method"] == "gptq"
    assert said["matrix_bits"] == 4.5
    assert said["bytes_after"] < said["bytes_before"]
    quality = said["quality"]
    assert quality["tokens"] > 500
    assert 0.5 < quality["agreement"] <= 1
    assert quality["perplexity"] == pytest.approx(quality["reference"], rel=0.05)
    stored = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert said["bytes_after"] <= stored < said["bytes_after"] + 20_000
    model = huggingface.read(out)
    assert any(isinstance(module, LowBitLinear) for module in model.modules())
    assert (out / "tokenizer.json").is_file()
    again = CliRunner().invoke(
        app, ["model", "quantize", str(directory), "--out", str(out), *options]
    )
    assert isinstance(again.exception, ModelError)
    assert "exists already" in str(again.exception)


@pytest.mark.slow
def test_text_output_and_timing(directory, tmp_path):
    out = tmp_path / "small"
    result = CliRunner().invoke(
        app,
        [
            "model",
            "quantize",
            str(directory),
            "--out",
            str(out),
            "--format",
            "int8-g32",
            "--method",
            "rtn",
            "--eval-tokens",
            "0",
        ],
    )
    assert result.exit_code == 0, result.output
    assert "int8-g32, 8.500 bits" in result.output
    assert "x faster" in result.output
    assert f"wrote {out}" in " ".join(result.output.split())


def test_a_model_agrees_with_itself(directory, tokens):
    model = huggingface.read(directory).eval()
    result = compare(model, model, tokens.heldout, max_tokens=1000)
    assert result.agreement == 1
    assert result.rise == 0
    assert 1 < result.perplexity < 512


def test_what_is_refused_before_any_work(directory, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KernelError, match=r"blocks\.0\..*multiple of 128; nearest"):
        quantize_directory(directory, out, "int4-g128", method="rtn", eval_tokens=0)
    with pytest.raises(KernelError, match="expected one of int"):
        quantize_directory(directory, out, "it4-g32")
    bare = tmp_path / "bare"
    huggingface.write(bare, huggingface.read(directory))
    with pytest.raises(ModelError, match=r"tokenizer\.json: not found"):
        quantize_directory(bare, out, "int4-g32", method="rtn")
    assert not out.exists()


def test_calibration_text(tokens):
    rows = calibration(tokens.train, samples=3, length=10, vocab_size=512)
    assert rows.shape == (3, 10)
    assert torch.equal(rows[0], calibration(tokens.train, samples=3, length=10, vocab_size=512)[0])
    with pytest.raises(ModelError, match="expected at least 1000000000"):
        calibration(tokens.train, samples=1, length=10**9, vocab_size=512)
    with pytest.raises(ModelError, match="the model knows 5"):
        calibration(tokens.train, samples=3, length=10, vocab_size=5)


def test_finetuning_with_rounding_is_reached_by_the_command(directory, few, tmp_path):
    options = ["--format", "bipolar2-g32", "--method", "rtn", "--text", str(few)]
    options += ["--eval-tokens", "256", "--no-timing", "--length", "32", "-o", "json"]
    perplexity = {}
    for seconds in ("0", "0.5"):
        out = tmp_path / seconds
        words = ["model", "quantize", str(directory), "--out", str(out), "--finetune", seconds]
        result = CliRunner().invoke(app, [*words, *options])
        assert result.exit_code == 0, result.output
        perplexity[seconds] = json.loads(result.stdout)["quality"]["perplexity"]
    assert perplexity["0.5"] != perplexity["0"]


def test_seconds_of_finetuning_are_checked(directory, few, tmp_path):
    with pytest.raises(ConfigError, match=r"finetune = -1.*0 or more"):
        quantize_directory(directory, tmp_path / "no", "int4-g32", finetune_s=-1)
