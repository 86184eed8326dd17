"""What serving can choose of kernels and formats, and the mode of equal bits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ShoalError  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.initialise import init_weights  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.serve.engine.build import engine_of, prepare  # noqa: E402


def model(dtype: torch.dtype = torch.float32) -> Transformer:
    made = Transformer(
        ModelConfig(
            vocab_size=120,
            hidden=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            ffn_hidden=96,
            max_position=256,
            initializer_range=0.2,
        )
    )
    init_weights(made, seed=2)
    return made.to(dtype)


def answers(prompts: list[list[int]], new: int = 6, **options):
    """Tokens and log probabilities of each prompt, all of them served at once."""
    job = ServeJob(model="tiny", kv_tokens=2048, threads=1, **options)
    engine, _, _ = engine_of(job, prepare(job, model()))
    result: dict[str, list] = {str(at): [] for at in range(len(prompts))}
    for at, prompt in enumerate(prompts):
        engine.add(
            Request(
                id=str(at),
                tokens=list(prompt),
                n_prompt=len(prompt),
                params=SamplingParams(max_tokens=new, temperature=0.0, logprobs=1),
            )
        )
    while engine.busy:
        for output in engine.step():
            for token, info in zip(output.tokens, output.infos, strict=True):
                result[output.request_id].append((token, info.logprob))
    return list(result.values())


PROMPTS = [[5, 9, 13] * 9, [7] * 40, [1], list(range(60)), [3, 4] * 33]


def test_exact_numbers_do_not_depend_on_company_or_on_how_prompts_are_cut():
    alone = [answers([prompt], exact=True)[0] for prompt in PROMPTS]
    assert answers(PROMPTS, exact=True) == alone
    assert answers(PROMPTS, exact=True, max_step_tokens=17, max_running=3) == alone
    assert answers(PROMPTS[::-1], exact=True)[::-1] == alone


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": {"linear": "torch", "paged_attention": "torch", "rms_norm": "reference"}},
        {"kernel": {"paged_attention": "reference"}},
    ],
    ids=str,
)
def test_other_kernels_give_the_same_tokens(options):
    wanted = answers(PROMPTS)
    result = answers(PROMPTS, **options)
    for one, other in zip(wanted, result, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert max(abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True)) < 1e-3


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"kv_format": "int8"}, 0.2),
        ({"kv_format": {"name": "bfp", "bits": 16}}, 0.2),
        ({"kv_format": {"name": "bfp", "bits": 16, "ksort": "pairs"}}, 0.2),
        ({"weights": "int8-channel"}, 0.3),
    ],
    ids=str,
)
def test_fewer_bits_change_little(options, tolerance):
    (wanted,), (result,) = answers([PROMPTS[3]], new=1), answers([PROMPTS[3]], new=1, **options)
    assert abs(wanted[0][1] - result[0][1]) < tolerance


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernel": {"lienar": "cpp"}}, "no such operator"),
        ({"kernel": {"linear": "torch"}, "exact": True}, "the call requires exact"),
        ({"kv_format": {"name": "bfp", "block": 64}}, "do not divide heads of 32"),
        ({"kv_format": "int9"}, "expected one of"),
        ({"weights": "int4-g7"}, "int4-g7"),
        ({"weights": "int99"}, "int99"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(options, words):
    with pytest.raises(ShoalError, match=words):
        answers([[1, 2, 3]], **options)
