"""Directories: parity with transformers in both directions, and what is refused."""

from __future__ import annotations

import json
import struct
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from shoal.core.errors import ModelError  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig, RopeScaling  # noqa: E402
from shoal.model.families.llama import Llama  # noqa: E402
from shoal.model.generate import generate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def tokens(config, length=96, rows=2, seed=1):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, length), generator=source)


def theirs(directory):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def greedy_theirs(model, prompt, count):
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def same(ours, hf, config):
    ids = tokens(config)
    with torch.no_grad():
        a, b = ours(ids), hf(ids).logits
    assert a.dtype == b.dtype == torch.float32
    assert b.std() > 0.1  # logits that say something
    assert (a - b).abs().max().item() < 1e-4
    prompt = ids[0, :16].tolist()
    assert generate(ours, prompt, 64, eos=()) == greedy_theirs(hf, prompt, 64)


def test_transformers_reads_what_we_write(config, make, tmp_path):
    ours = make(config)
    huggingface.write(tmp_path / "m", ours)
    same(ours, theirs(tmp_path / "m"), config)


def test_we_read_what_transformers_writes(config, make, tmp_path):
    huggingface.write(tmp_path / "seed", make(config, seed=3))
    hf = theirs(tmp_path / "seed")
    hf.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    same(huggingface.read(tmp_path / "theirs"), hf, config)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(rope_type="linear", factor=4.0),
        RopeScaling(rope_type="dynamic", factor=2.0),
        RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
        RopeScaling(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=0.9,
            truncate=False,
        ),
    ],
    ids=["linear", "dynamic", "yarn", "yarn-mscale"],
)
def test_rope_scalings(scaling, make, tmp_path):
    changes = {"rope_scaling": scaling, "initializer_range": 0.15}
    if scaling.rope_type != "dynamic":  # whose test is to go beyond the positions
        changes["max_position"] = 128
    config = CONFIG.model_copy(update=changes)
    ours = make(config)
    huggingface.write(tmp_path / "m", ours)
    ids = tokens(config)
    with torch.no_grad():
        assert (ours(ids) - theirs(tmp_path / "m")(ids).logits).abs().max() < 1e-4
    again = huggingface.read(tmp_path / "m")
    assert again.config.rope_scaling == config.rope_scaling


def test_round_trip_is_exact_and_shards(config, make, tmp_path):
    ours = make(config)
    huggingface.write(tmp_path / "m", ours, shard_bytes=100_000)
    index = json.loads((tmp_path / "m" / huggingface.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 1
    again = huggingface.read(tmp_path / "m")
    assert again.config.model_copy(update={"name": config.name}) == config
    for (name, a), (other, b) in zip(
        ours.named_parameters(), again.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)


def test_dtype_is_kept_or_chosen(make, tmp_path):
    config = CONFIG
    huggingface.write(tmp_path / "m", make(config, dtype=torch.bfloat16))
    assert json.loads((tmp_path / "m/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert huggingface.read(tmp_path / "m").embed.weight.dtype == torch.bfloat16
    assert huggingface.read(tmp_path / "m", torch.float32).embed.weight.dtype == torch.float32


def test_mistral_without_window_is_llama(make, tmp_path):
    directory = good(make, tmp_path)
    edit(directory, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None)
    assert huggingface.read(directory).config.family == "llama"
    edit(directory, sliding_window=16)
    with pytest.raises(ModelError, match=r"config\.json: sliding_window = 16"):
        huggingface.read(directory)


def test_tokenizer_opens_in_transformers(make, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["def f(x):\n    return x"] * 4,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = CONFIG.model_copy(update={"vocab_size": 300, "eos_token_id": 0})
    huggingface.write(tmp_path / "m", make(config), tmp_path / "tokenizer.json")
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "def f(x):\n    return x\n"
    assert auto.encode(text) == tokenizer.encode(text).ids
    assert auto.decode(auto.encode(text)) == text
    assert auto.eos_token == "<end>"
    with pytest.raises(ModelError, match=r"tokenizer\.json: has tokens up to 2\d\d"):
        huggingface.write(tmp_path / "small", make(CONFIG), tmp_path / "tokenizer.json")
    assert not (tmp_path / "small").exists()


# --- what is refused

CONFIG = ModelConfig(
    vocab_size=128,
    hidden=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_hidden=48,
    max_position=64,
)


def good(make, tmp_path, **options):
    huggingface.write(tmp_path / "good", make(CONFIG), **options)
    return tmp_path / "good"


def edit(directory, **changes):
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt_neox"},
            r"config\.json: model_type = 'gpt_neox': expected one of llama",
        ),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "absent"}, "model_type = None"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": "wide"}, "hidden"),
        ({"hidden_size": 10**12}, "hidden"),
        ({"num_hidden_layers": 10**9}, "num_layers"),
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.1\."),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        (
            {"intermediate_size": 64},
            r"has the shape \[48, 32\], and config.json asks for \[64, 32\]",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"rope_scaling\.rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling.*factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "original_max_position"),
        ({"attention_bias": True}, r"q_proj\.bias is missing"),
        ({"tie_word_embeddings": True}, None),
    ],
)
def test_wrong_configurations(changes, message, make, tmp_path):
    directory = good(make, tmp_path)
    edit(directory, **changes)
    if message is None:  # a spare lm_head under tied weights does no harm
        assert huggingface.read(directory).output is None
        return
    with pytest.raises(ModelError, match=message) as caught:
        huggingface.read(directory)
    assert str(directory) in str(caught.value)


def test_code_of_the_model_is_never_imported(make, tmp_path):
    directory = good(make, tmp_path)
    canary = tmp_path / "canary"
    (directory / "modeling_evil.py").write_text(f"open({str(canary)!r}, 'w').write('ran')\n")
    edit(directory, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    with pytest.raises(ModelError, match=r"config\.json: auto_map names code"):
        huggingface.read(directory)
    assert not canary.exists()
    assert "modeling_evil" not in sys.modules


def test_pickles_are_never_opened(make, tmp_path):
    directory = good(make, tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: a pickle"):
        huggingface.read(directory)
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        huggingface.read(directory)


def test_missing_things(make, tmp_path):
    with pytest.raises(ModelError, match="no such directory"):
        huggingface.read(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        huggingface.read(tmp_path / "empty")
    directory = good(make, tmp_path, shard_bytes=20_000)
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name}: missing; model\.safetensors\.index"):
        huggingface.read(directory)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "weights.bin"])
def test_index_stays_in_its_directory(name, make, tmp_path):
    directory = good(make, tmp_path, shard_bytes=20_000)
    path = directory / huggingface.INDEX
    raw = json.loads(path.read_text())
    raw["weight_map"]["model.norm.weight"] = name
    path.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="in this directory"):
        huggingface.read(directory)


def rewrite_header(path, change):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def huge(header):
    header["model.norm.weight"]["shape"] = [10**6, 10**6]


def huge_offsets(header):
    huge(header)
    header["model.norm.weight"]["data_offsets"] = [0, 4 * 10**12]


def overlap(header):
    header["model.norm.weight"]["data_offsets"] = [0, 128]


def strange(header):
    header["model.norm.weight"]["dtype"] = "F3"


def negative(header):
    header["model.norm.weight"]["shape"] = [-32, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (huge, "of 1000000000000 F32 elements"),
        (huge_offsets, "tensor"),
        (overlap, "does not start where the last one ends"),
        (strange, "unknown dtype 'F3'"),
        (negative, "no usable shape"),
    ],
)
def test_headers_that_lie(change, message, make, tmp_path):
    directory = good(make, tmp_path)
    path = directory / "model.safetensors"
    rewrite_header(path, change)
    with pytest.raises(ModelError, match=message) as caught:
        huggingface.read(directory)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"\xff\xfe{}",
        struct.pack("<Q", 40000) + b"[" * 40000,
        struct.pack("<Q", 2) + b"{}" + b"spare",
    ],
)
def test_files_that_are_no_safetensors(content, make, tmp_path):
    directory = good(make, tmp_path)
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        huggingface.read(directory)


def test_truncated_file(make, tmp_path):
    directory = good(make, tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match="its tensors claim"):
        huggingface.read(directory)


def test_tensors_of_another_model(make, tmp_path):
    directory = good(make, tmp_path)
    path = directory / "model.safetensors"
    held = load_file(path)
    held["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
    save_file(held, path)
    with pytest.raises(ModelError, match=r"mlp\.extra\.weight is not part"):
        huggingface.read(directory)
    del held["model.layers.0.mlp.extra.weight"]
    held["model.norm.weight"] = torch.zeros(32, dtype=torch.int32)
    save_file(held, path)
    with pytest.raises(ModelError, match="of dtype I32"):
        huggingface.read(directory)


def test_nothing_half_written(make, tmp_path):
    directory = good(make, tmp_path)
    with pytest.raises(ModelError, match="exists already"):
        huggingface.write(directory, make(CONFIG))
    with pytest.raises(ModelError, match=r"embed\.weight"):
        huggingface.write_state(tmp_path / "other", CONFIG, {})
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_disk_full_leaves_nothing(make, tmp_path, monkeypatch):
    import safetensors
    import safetensors.torch

    def full(*args, **kwargs):
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(ModelError, match=r"out: cannot be written .*No space left.*free some"):
        huggingface.write(tmp_path / "out", make(CONFIG))
    assert list(tmp_path.iterdir()) == []


def test_default_rope_parameters_spelling():
    raw = Llama().to_huggingface(CONFIG)
    del raw["rope_theta"], raw["rope_scaling"]
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 123.0}
    assert Llama().from_huggingface(raw).rope_theta == 123.0
