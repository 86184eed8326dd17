import pytest

from shoal.cost.arithmetic import (
    activation_bytes,
    flops_by_op,
    flops_per_token,
    linears,
    logits_bytes,
    parameters,
)
from shoal.cost.shapes import find


@pytest.mark.parametrize(
    "name", ["shoal-1m", "shoal-4m", "shoal-moe-4m", "Qwen3-0.6B", "Qwen2.5-0.5B"]
)
def test_parameters_equal_a_module_count(name):
    torch = pytest.importorskip("torch")
    nn = torch.nn
    shape = find(name)
    D, q, kv = shape.hidden, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    modules = []
    with torch.device("meta"):
        modules += [nn.Embedding(shape.vocab_size, D), nn.RMSNorm(D)]
        if not shape.tied:
            modules.append(nn.Linear(D, shape.vocab_size, bias=False))
        for _ in range(shape.num_layers):
            bias = shape.attention_bias
            modules += [nn.Linear(D, q, bias=bias), nn.Linear(D, kv, bias=bias)]
            modules += [nn.Linear(D, kv, bias=bias), nn.Linear(q, D, bias=False)]
            modules += [nn.RMSNorm(D), nn.RMSNorm(D)]
            if shape.qk_norm:
                modules += [nn.RMSNorm(shape.head_dim), nn.RMSNorm(shape.head_dim)]
            width = shape.expert_hidden if shape.num_experts else shape.ffn_hidden
            for _ in range(shape.num_experts or 1):
                modules += [nn.Linear(D, width, bias=False), nn.Linear(D, width, bias=False)]
                modules += [nn.Linear(width, D, bias=False)]
            if shape.num_experts:
                modules.append(nn.Linear(D, shape.num_experts, bias=False))
    assert parameters(shape) == sum(p.numel() for m in modules for p in m.parameters())


def test_flops_are_six_times_the_matrices_plus_attention():
    shape = find("Llama-3-8B")
    matrices = sum(x.parameters for x in linears(shape))
    assert flops_per_token(shape, 1) == pytest.approx(
        6 * matrices + 12 * shape.num_layers * shape.hidden
    )
    by_op = flops_by_op(shape, 8192)
    # 12 L D T over the causal half.
    half = 6 * shape.num_layers * shape.hidden * 8193
    assert by_op["attention"] == pytest.approx(half)
    assert flops_per_token(shape, 8192, training=False) * 3 == pytest.approx(sum(by_op.values()))


def test_a_mixture_pays_for_the_experts_a_token_meets():
    by_name = {x.name: x for x in linears(find("Mixtral-8x7B-v0.1"))}
    expert = by_name["expert_in"]
    assert expert.copies == 8
    assert expert.flops_per_token == 2 * expert.N * expert.K * expert.layers * 2


def test_activations_of_latent_attention():
    """DeepSeek-V3: 128 heads, 1536 and 576 compressed numbers; the experts' are the same."""
    shape, tokens = find("DeepSeek-V3"), 4096
    dense = shape.model_copy(update={"attention": "MHA", "source": ""})
    one = [activation_bytes(each, tokens, 1, layers=1) / tokens for each in (shape, dense)]
    heads = 2 * 128 * (2 * 192 + 2 * 128) + 2 * 2 * (1536 + 576)
    assert one[0] - one[1] == heads - 2 * 128 * 4 * shape.head_dim
    kept = [
        activation_bytes(each, tokens, 1, recompute="elementwise", layers=9) / tokens - whole
        for each, whole in zip((shape, dense), one, strict=True)
    ]
    saved = 3 * 128 * shape.head_dim - (1536 + 576) + 128 * (shape.head_dim - 128)
    assert kept[1] - kept[0] == 9 * 2 * saved


def test_activations():
    shape = find("shoal-4m")
    whole = activation_bytes(shape, 256, 8)
    assert activation_bytes(shape, 256, 16) == 2 * whole
    assert activation_bytes(shape, 256, 8, recompute="full") < whole / 2
    assert activation_bytes(shape, 256, 8, precision="fp32") > 1.8 * whole
    assert whole / 2 < activation_bytes(shape, 256, 8, tp=2) < whole
    # Per layer and token, bf16: 2 residuals, 2 normed (D), q + 2 kv + out, 4 F; q and k
    # once more, before their norms.
    q, kv = 4 * 64, 2 * 64
    lanes = 4 * 256 + q + 2 * kv + q + 4 * 704 + q + kv
    assert whole == pytest.approx(4 * 256 * 8 * 2 * lanes, rel=0.01)


def test_logits_are_bounded_by_the_chunk():
    shape = find("Qwen3-14B")
    few, many = logits_bytes(shape, 4096, 1), logits_bytes(shape, 4096, 64)
    assert many - few == pytest.approx(2 * 2 * 4096 * 63 * shape.hidden)
