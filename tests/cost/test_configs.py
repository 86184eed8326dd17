"""Shapes from ``config.json``, with the keys that models of each type are published with."""

import json

import pytest

from shoal.core.errors import ModelError
from shoal.cost.arithmetic import parameters
from shoal.cost.configs import KINDS, dtype_of, from_huggingface, notes
from shoal.cost.latent import Latent, latent_of
from shoal.cost.shapes import find, resolve

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
DEEPSEEK = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "torch_dtype": "bfloat16",
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}
# Name of the shipped shape that is the same model -> its config.json.
PUBLISHED = {
    "DeepSeek-V3": DEEPSEEK,
    "Kimi-K2-Instruct": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        **DEEPSEEK,
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 163840,
    },
    "Llama-4-Scout-17B-16E": SCOUT,
    "Llama-4-Maverick-17B-128E": {
        **SCOUT,
        "text_config": {
            **SCOUT["text_config"],
            "interleave_moe_layer_step": 2,
            "max_position_embeddings": 1048576,
            "moe_layers": list(range(1, 48, 2)),
            "num_local_experts": 128,
            "use_qk_norm": False,
        },
    },
    "Mistral-Small-3.1-24B": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "spatial_merge_size": 2,
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    },
    # Says no heads and no vocabulary: those are the defaults of its class.
    "Gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    },
    "GLM-4.6": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 3,
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 92,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "vocab_size": 151552,
    },
    "Qwen3-Next-80B-A3B": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_num_value_heads": 32,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "quantization_config": {"quant_method": "mxfp4"},
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "Phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.75,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "Granite-3.1-8B": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 49155,
    },
    "Granite-4.0-Micro": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 2560,
        "intermediate_size": 8192,
        "layer_types": ["attention"] * 40,
        "max_position_embeddings": 131072,
        "num_attention_heads": 40,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "num_local_experts": 0,
        "shared_intermediate_size": 8192,
        "tie_word_embeddings": True,
        "vocab_size": 100352,
    },
    "OLMo-2-1124-7B": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "OLMo-3-7B": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    },
    "MiniMax-M2": {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "tie_word_embeddings": False,
        "use_qk_norm": True,
        "vocab_size": 200064,
    },
}
NEMOTRON = {
    "architectures": ["NemotronForCausalLM"],
    "model_type": "nemotron",
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "max_position_embeddings": 4096,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "vocab_size": 256000,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_shipped_shape(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    ours, theirs = find(name), resolve(str(tmp_path))
    assert theirs.name == tmp_path.name
    same = {"name", "family", "source", "qk_norm", "attention_bias", "vocab_size", "stored"}
    same |= {"rope_base"}  # these files say none
    assert theirs.model_dump(exclude=same) == ours.model_dump(exclude=same)
    assert parameters(theirs) == pytest.approx(parameters(ours), rel=1e-3)
    assert latent_of(theirs) == latent_of(ours)
    assert "not run by Shoal" in notes(theirs)[0] and notes(ours) == ()


def test_the_base_of_rotary_positions_is_the_files():
    def base(**changes):
        return from_huggingface({**PUBLISHED["OLMo-3-7B"], **changes}, name="one").rope_base

    assert base() is None and base(rope_theta="many") is None
    assert base(rope_theta=500_000) == base(rope_parameters={"rope_theta": 5e5}) == 5e5


def test_how_weights_are_stored():
    def stored(**changes):
        return from_huggingface({**PUBLISHED["OLMo-3-7B"], **changes}, name="one").stored

    assert stored() == stored(torch_dtype="float16") == find("shoal-4m").stored == "fp32"
    assert stored(torch_dtype="bfloat16") == stored(dtype="bfloat16") == find("OLMo-3-7B").stored
    packed = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
    assert stored(dtype="bfloat16") == "bf16" and stored(**packed) == "fp32"


@pytest.mark.parametrize(
    ("config", "held"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4-g128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8-channel"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4-g64"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
            },
            "fp8",
        ),
        (
            {"config_groups": {"0": {"weights": {"type": "int", "num_bits": 4, "group_size": 32}}}},
            "int4-g32",
        ),
        ({"quant_method": "of tomorrow"}, "plain"),
        ({"config_groups": {"0": {"weights": 7}}}, "plain"),
        ({"config_groups": {"0": {"weights": {"type": "int"}}}}, "plain"),
        ({"quant_method": "gptq", "bits": "four"}, "plain"),
    ],
)
def test_in_which_format_the_files_hold_the_weights(config, held):
    whole = {**PUBLISHED["OLMo-3-7B"], "quantization_config": config}
    assert from_huggingface(whole, name="one").weights == held


def test_what_a_shape_cannot_say_stands_in_its_notes():
    def said(name):
        return notes(from_huggingface(PUBLISHED[name], name=name))[0]

    assert "sliding_attention on 24 of 32 layers" in said("OLMo-3-7B")
    assert "linear_attention on 36 of 48 layers" in said("Qwen3-Next-80B-A3B")
    assert "text part only" in said("Gemma-3-4b-it")
    assert "chunked attention 8192" in said("Llama-4-Scout-17B-16E")


def test_a_feed_forward_layer_that_is_not_gated():
    shape = from_huggingface(NEMOTRON, name="minitron")
    assert not shape.gated
    # Minitron-4B-Base has 4.19 billion.
    assert parameters(shape) == pytest.approx(4.19e9, rel=0.01)


def test_latent_attention_without_compressed_queries():
    lite = {**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None}
    assert latent_of(from_huggingface(lite)) == Latent(0, 512, 128, 64, 128)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
def test_families_that_run(kind):
    shape = from_huggingface({**LLAMA, "model_type": kind}, name="x")
    assert (shape.num_layers, shape.head_dim, shape.tied) == (2, 16, True)
    assert shape.attention == "GQA"
    assert shape.qk_norm == (kind == "qwen3")
    assert shape.attention_bias == (kind == "qwen2")
    assert shape.num_experts == (8 if kind == "mixtral" else 0)
    assert notes(shape) == ()


def test_what_runs_is_what_the_models_read():
    pytest.importorskip("torch")
    from shoal.model.huggingface import ARCHITECTURES

    assert {kind for kind in KINDS if KINDS[kind].runs} <= set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["Gemma-3-4b-it", "Phi-4-mini-instruct", "Mistral-Small-3.1-24B"])
def test_no_fresh_model_of_another_type_is_built(name):
    pytest.importorskip("torch")
    from shoal.model.config import ModelConfig

    with pytest.raises(ModelError, match=r"it is of type .* can be planned, but building it needs"):
        ModelConfig.from_shape(from_huggingface(PUBLISHED[name], name=name))


def test_a_decoder_inside_another_model_does_not_run():
    inner = from_huggingface({"model_type": "llava", "text_config": LLAMA}, name="x")
    assert inner.hidden == 64 and "not run by Shoal" in notes(inner)[0]
    kimi = from_huggingface(
        {"model_type": "kimi_k25", "text_config": PUBLISHED["Kimi-K2-Instruct"]}
    )
    assert (kimi.family, kimi.num_experts) == ("kimi_k2", 384)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_experts_are_never_read_as_a_dense_model(kind):
    mixture = {**LLAMA, "model_type": kind, "num_experts": 4, "num_experts_per_tok": 2}
    mixture.pop("num_local_experts", None)
    given = {**mixture, "num_local_experts": 4, "moe_intermediate_size": 48}
    shape = from_huggingface(given)
    assert (shape.num_experts, shape.top_k, shape.expert_hidden) == (4, 2, 48)
    if not KINDS[kind].defaults.get("num_experts_per_tok"):
        with pytest.raises(ModelError, match="4 experts are stated and num_experts_per_tok is not"):
            from_huggingface({**given, "num_experts_per_tok": None})
        with pytest.raises(ModelError, match="num_experts_per_tok = 2 refers to experts"):
            from_huggingface({**LLAMA, "model_type": kind, "num_experts_per_tok": 2})


def test_layers_without_experts():
    def dense(**keys):
        base = {**LLAMA, "model_type": "qwen3_moe", "num_hidden_layers": 8, "num_experts": 4}
        return from_huggingface({**base, "num_experts_per_tok": 2, **keys}).num_dense_layers

    assert dense() == 0
    assert dense(decoder_sparse_step=2) == 4
    assert dense(mlp_only_layers=[0, 7]) == 2
    assert dense(first_k_dense_replace=3) == 3
    assert dense(moe_layers=[1, 3]) == 6


def test_the_type_of_the_weights_may_stand_in_the_text_part():
    assert dtype_of({}) == "float32"
    assert dtype_of({"torch_dtype": "bfloat16"}) == "bfloat16"
    assert dtype_of({"text_config": {"dtype": "bfloat16"}}) == "bfloat16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_bigcode"}, r"'gpt_bigcode'.*llama.*mixtral"),
        ({"model_type": "glm4_mo"}, "did you mean 'glm4_moe'"),
        ({"model_type": None}, "model_type = None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"hidden_size": None}, "has no value for hidden"),
        ({"num_hidden_layers": -1}, "num_layers"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4': expected a whole number"),
        ({"num_attention_heads": True}, "expected a whole number"),
        ({"intermediate_size": [96, 64]}, r"intermediate_size = \[96, 64\]"),
        ({"text_config": 3}, "text_config = 3: expected an object"),
        ({"text_config": {}}, "has no value for num_layers"),
        ({"num_experts": -4}, "num_experts = -4"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "top_k = 5 of 4 experts"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "a list of layers"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_layers": [[1]]}, "a list of layers"),
        (
            {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 10**15},
            "at most 10000",
        ),
        ({"kv_lora_rank": 512}, "kv_lora_rank is stated and qk_nope_head_dim is not"),
        ({"full_attention_interval": "x", "model_type": "qwen3_next"}, "full_attention_interval"),
    ],
)
def test_bad_files_say_what_is_wrong(change, message):
    with pytest.raises(ModelError, match=message):
        from_huggingface({**LLAMA, **change})
