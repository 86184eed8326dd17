import json

import pytest

from shoal.core.errors import ConfigError, ModelError
from shoal.cost.arithmetic import active_parameters, parameters
from shoal.cost.latent import Latent, latent_of
from shoal.cost.shapes import find, names, published, resolve

# Layouts that a shape does not describe: latent attention, learned positions, a shared expert of
# a width of its own, layers of several kinds, and embeddings of each layer.
EXCEPTIONS = {
    "Gemma-3n-E4B",
    "Nemotron-3-Nano-30B-A3B",
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
    assert len(names()) == 129 + 13
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


@pytest.mark.parametrize(
    "name", ["Mixtral-8x7B-v0.1", "Qwen3-30B-A3B", "OLMoE-1B-7B", "DeepSeek-V3", "Kimi-K2-Instruct"]
)
def test_active_parameters_of_mixtures(name):
    _, active = published(name)
    assert active_parameters(find(name)) == pytest.approx(active, rel=0.01)


def test_names_are_found_however_they_are_spelled():
    assert find("qwen3 14b") == find("Qwen3-14B") == find("Qwen/Qwen3-14B")
    assert find("gpt-2 small").name == "GPT-2 small"


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "Llama-3.1-8B"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "Llama-3.1-70B"),
        ("Qwen/Qwen3-8B-FP8", "Qwen3-8B"),
        ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", "Qwen3-30B-A3B"),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "Qwen3-235B-A22B"),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "Qwen3-14B"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct-AWQ", "Qwen2.5-Coder-32B"),
        ("google/gemma-3-27b-it-qat-q4_0-gguf", "Gemma-3-27b-it"),
        ("google/gemma-3-4b-pt", "Gemma-3-4b-it"),
        ("meta-llama/Llama-3.3-70B", "Llama-3.3-70B-Instruct"),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "Mistral-Small-3.1-24B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B-v0.1"),
        ("allenai/Olmo-3-1025-7B", "OLMo-3-7B"),
        ("moonshotai/Kimi-K2-Base", "Kimi-K2-Instruct"),
        ("deepseek-ai/DeepSeek-R1-0528", "DeepSeek-R1"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama-4-Scout-17B-16E"),
        ("Llama-4-Maverick", "Llama-4-Maverick-17B-128E"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "Llama-3.1-8B"),
        # What is shipped with the word or the date wins over what is not.
        ("deepseek-ai/DeepSeek-V3.1", "DeepSeek-V3.1"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507-FP8", "Qwen3-30B-A3B-2507"),
        ("moonshotai/Kimi-K2-Instruct-0905", "Kimi-K2-Instruct-0905"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "Mistral-7B-v0.3"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "Mistral-Small-24B-2501"),
    ],
)
def test_ids_of_the_hub_name_shipped_shapes(spelled, name):
    same = {"weights"}
    assert find(spelled).model_dump(exclude=same) == find(name).model_dump(exclude=same)
    assert find(spelled).name == name


@pytest.mark.parametrize(
    ("spelled", "held"),
    [
        ("Qwen/Qwen3-8B", "plain"),
        ("Qwen/Qwen3-8B-FP8", "fp8"),
        ("nvidia/Qwen3-235B-A22B-NVFP4", "nvfp4"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct-AWQ", "int4-g128"),
        ("unsloth/Qwen3-14B-unsloth-bnb-4bit", "nf4-g64"),
        ("openai/gpt-oss-120b", "mxfp4"),
        ("unsloth/gpt-oss-120b-BF16", "plain"),
        ("deepseek-ai/DeepSeek-R1-0528", "fp8"),
        ("moonshotai/Kimi-K2-Thinking", "int4-g32"),
    ],
)
def test_a_name_says_how_its_files_hold_the_weights(spelled, held):
    assert find(spelled).weights == held


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-V4",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "Qwen/Qwen3-VL-8B-Instruct",
        "ibm-granite/granite-4.0-h-micro",
        "instruct",
        "org/-",
        "",
    ],
)
def test_other_models_are_not_taken_for_shipped_ones(name):
    with pytest.raises(ModelError, match=r"shipped shapes.*describe your own.*plan-a-cluster\.md"):
        find(name)


def test_every_shipped_name_is_its_own():
    for name in names():
        assert find(name).name == find(f"some-org/{name}").name == name


def test_unknown_name_has_the_nearest():
    with pytest.raises(ModelError, match=r"did you mean 'Qwen3-14B', '.*' or '.*'"):
        find("Qwen3-14")


@pytest.mark.parametrize("name", ["DeepSeek-V3.1", "Kimi-K2-Thinking"])
def test_rows_of_latent_attention_say_its_ranks(name):
    assert latent_of(find(name)) == Latent(1536, 512, 128, 64, 128)


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
