import json

import pytest

from shoal.core.errors import ConfigError, ModelError
from shoal.cost.arithmetic import active_parameters, parameters
from shoal.cost.shapes import find, from_huggingface, names, published, resolve

# Layouts that a shape does not describe: latent attention, learned positions, and a
# shared expert of a width of its own.
EXCEPTIONS = {
    "DeepSeek-V3",
    "DeepSeek-R1",
    "DeepSeek-V3.2",
    "DeepSeek-V2",
    "DeepSeek-V2-Lite",
    "Kimi-K2-Instruct",
    "GLM-5",
    "OPT-125M",
    "Qwen2-57B-A14B",
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}


def test_all_rows_read_and_the_zoo_comes_first():
    assert len(names()) == 109 + 13
    assert names()[0] == "shoal-0.3m"
    for name in names():
        assert find(name).source


@pytest.mark.parametrize("name", [n for n in names() if n not in EXCEPTIONS])
def test_parameters_match_the_published_number(name):
    total, _ = published(name)
    # The table has three decimals of a billion.
    assert parameters(find(name)) == pytest.approx(total, rel=0.01, abs=6e5)


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_exceptions_are_exceptions(name):
    total, _ = published(name)
    assert abs(parameters(find(name)) / total - 1) > 0.01


@pytest.mark.parametrize("name", ["Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "OLMoE-1B-7B"])
def test_active_parameters_of_mixtures(name):
    _, active = published(name)
    assert active_parameters(find(name)) == pytest.approx(active, rel=0.01)


def test_names_are_found_however_they_are_spelled():
    assert find("qwen3 14b") == find("Qwen3-14B") == find("Qwen/Qwen3-14B")
    assert find("gpt-2 small").name == "GPT-2 small"


def test_unknown_name_has_a_hint():
    with pytest.raises(ModelError, match="did you mean 'Qwen3-14B'"):
        find("Qwen3-14")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
def test_huggingface_families(kind):
    shape = from_huggingface({**LLAMA, "model_type": kind}, name="x")
    assert (shape.num_layers, shape.head_dim, shape.tied) == (2, 16, True)
    assert shape.attention == "GQA"
    assert shape.qk_norm == (kind == "qwen3")
    assert shape.attention_bias == (kind == "qwen2")
    assert shape.num_experts == (8 if kind == "mixtral" else 0)


def test_unknown_architecture_lists_the_known():
    with pytest.raises(ModelError, match=r"'gpt_bigcode'.*llama.*mixtral"):
        from_huggingface({"model_type": "gpt_bigcode"})


def test_missing_and_wrong_numbers_are_named():
    with pytest.raises(ModelError, match="lacks what gives hidden"):
        from_huggingface({k: v for k, v in LLAMA.items() if k != "hidden_size"})
    with pytest.raises(ModelError, match="num_layers"):
        from_huggingface({**LLAMA, "num_hidden_layers": -1})
    with pytest.raises(ModelError, match="cannot share"):
        from_huggingface({**LLAMA, "num_key_value_heads": 3})


def test_resolve_reads_directories_and_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert resolve(str(tmp_path)).hidden == 64
    find("shoal-4m").save(tmp_path / "mine.yaml")
    assert resolve(str(tmp_path / "mine.yaml")) == find("shoal-4m")
    text = (tmp_path / "mine.yaml").read_text()
    (tmp_path / "bad.yaml").write_text(text.replace("hidden:", "hiddn:", 1))
    with pytest.raises(ConfigError, match="hidden"):
        resolve(str(tmp_path / "bad.yaml"))
    (tmp_path / "config.json").write_text("{,")
    with pytest.raises(ModelError, match="line 1"):
        resolve(str(tmp_path))
    with pytest.raises(ModelError, match="no such file"):
        resolve(str(tmp_path / "none.yaml"))
