"""The engine gives the tokens that transformers gives, however its work is cut.

All four families under every combination of: prompts cut or whole, prefixes shared or not, nobody
preempted or somebody by swapping or by recomputing, blocks of 1 token or of 16, one rank or two.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parent))

from thread_ranks import thread_engine  # noqa: E402

from shoal.ir import ServeJob  # noqa: E402
from shoal.model.parameters import Parameters  # noqa: E402
from shoal.serve.engine.build import build_engine  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 100, 128, 150, 200, 255, 256, 300)
COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def prompts(lengths):
    """Random ones; every second starts like the one before it, and they come after the others."""
    source = random.Random(7)
    made: list[list[int]] = []
    for number, length in enumerate(lengths):
        fresh = [source.randrange(COMMON["vocab_size"]) for _ in range(length)]
        if number % 2:
            shared = len(made[-1]) * 3 // 4
            fresh[:shared] = made[-1][:shared]
        made.append(fresh)
    return made[::2] + made[1::2]


def checkpoint(family, directory):
    name, changes = FAMILIES[family]
    torch.manual_seed(5)
    config = getattr(transformers, name)(**{**COMMON, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(directory)
    return model


def reference(model, prompt, count):
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


@functools.cache
def oracle(family, directory, lengths, count):
    """Prompts, and what transformers says to them; the checkpoint is in the directory."""
    model = checkpoint(family, directory)
    request = prompts(lengths)
    expected = [reference(model, prompt, count) for prompt in request]
    assert len({token for row in expected for token in row}) > 30  # text that says something
    return request, expected


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory):
    """Family, lengths of prompts and number of tokens -> directory, prompts, tokens; once each."""
    folder = tmp_path_factory.mktemp("models")

    def make(family, lengths=LENGTHS, count=64):
        directory = folder / f"{family}-{len(lengths)}"
        return directory, *oracle(family, directory, lengths, count)

    yield make
    oracle.cache_clear()


def combination(chunked, reuse, preempt, block, *, tight=1024):
    """Fields of a job; ``tight`` tokens of cache are too few for all that would run."""
    return {
        "scheduler": {"name": "fcfs", "chunked": chunked},
        "max_step_tokens": 48 if chunked else 512,
        "kv": {"name": "paged", "prefix_reuse": reuse, "block_size": block},
        "kv_tokens": tight if preempt else 4096,
        "preempt": preempt or "recompute",
    }


CHUNKED, REUSE, PREEMPT, BLOCK = (True, False), (True, False), (None, "swap", "recompute"), (1, 16)
PRODUCT = list(itertools.product(CHUNKED, REUSE, PREEMPT, BLOCK))


def served(serve_all, found, fields, **others):
    """An engine's counters, once it has given the expected tokens."""
    directory, request, expected = found
    job = ServeJob.model_validate({"model": str(directory), "threads": 1, **fields, **others})
    if job.parallel.world == 1:
        engine, close = build_engine(job)[0], lambda: None
    else:  # ranks are threads here, and read the parameters as processes do
        engine, ranks = thread_engine(job, Parameters(Path(job.model)))
        close = ranks.close
    try:
        assert serve_all(engine, request, max_tokens=len(expected[0])) == expected
        stats = engine.stats()
        assert stats["blocks_used"] == 0
        return stats
    finally:
        close()


def check(stats, reuse, preempt):
    assert (stats["prefix_hit_tokens"] > 0) == reuse
    assert (stats["preemptions_total"] > 0) == bool(preempt)
    for way in ("swap_out_blocks_total", "swap_in_blocks_total"):
        assert (stats.get(way, 0) > 0) == (preempt == "swap"), way


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers(family, oracle_of, serve_all):
    result = oracle_of(family, (1, 1, 16, 17, 128, 160), 16)
    check(served(serve_all, result, combination(True, True, None, 16)), True, None)
    tight = combination(True, True, "swap", 1, tight=180)
    check(served(serve_all, result, tight, max_position=180), True, "swap")


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers_under_every_combination(family, tp, oracle_of, serve_all):
    result = oracle_of(family)
    assert len(PRODUCT) == 24
    for chunked, reuse, preempt, block in PRODUCT:
        fields = combination(chunked, reuse, preempt, block)
        stats = served(serve_all, result, fields, parallel={"tp": tp})
        check(stats, reuse, preempt)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers_by_other_parts_and_four_ranks(family, oracle_of, serve_all):
    result = oracle_of(family)
    for fields in ({"kv": "contiguous"}, {"scheduler": "static"}):
        served(serve_all, result, fields, kv_tokens=4096)
    cut = combination(True, True, None, 16)
    check(served(serve_all, result, cut, parallel={"tp": 2, "pp": 2}), True, None)
