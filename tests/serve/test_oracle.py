"""The engine gives the tokens that transformers gives, however its work is cut."""

from __future__ import annotations

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
from shoal.serve.build import build_engine  # noqa: E402

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

# name -> fields of the job; whether somebody must be preempted.
CUTS = {
    "whole": ({"scheduler": {"name": "fcfs", "chunked": False}, "max_step_tokens": 1024}, False),
    "chunked": ({"max_step_tokens": 29}, False),
    "no-reuse": ({"kv": {"name": "paged", "prefix_reuse": False}, "max_step_tokens": 64}, False),
    "block-1": ({"kv": {"name": "paged", "block_size": 1}, "max_step_tokens": 64}, False),
    "tiny-cache": ({"kv_tokens": 384, "max_step_tokens": 64}, True),
    "tiny-block-1": (
        {"kv": {"name": "paged", "block_size": 1}, "kv_tokens": 368, "max_step_tokens": 40},
        True,
    ),
    "tiny-no-reuse-whole": (
        {
            "scheduler": {"name": "fcfs", "chunked": False},
            "kv": {"name": "paged", "prefix_reuse": False, "block_size": 1},
            "kv_tokens": 368,
            "max_step_tokens": 512,
        },
        True,
    ),
    "contiguous": ({"kv": "contiguous"}, False),
    "static": ({"scheduler": "static"}, False),
}


def prompts(lengths):
    """Random ones; every second starts like the one before it."""
    source = random.Random(7)
    made: list[list[int]] = []
    for number, length in enumerate(lengths):
        fresh = [source.randrange(COMMON["vocab_size"]) for _ in range(length)]
        if number % 2:
            shared = len(made[-1]) * 3 // 4
            fresh[:shared] = made[-1][:shared]
        made.append(fresh)
    return made


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


def one_process(job):
    """An engine, and what ends it."""
    return build_engine(job)[0], lambda: None


def ranks(job):
    """The same by ranks, which are threads here and read the parameters as processes do."""
    engine, running = thread_engine(job, Parameters(Path(job.model)))
    return engine, running.close


def agree(family, directory, serve_all, lengths, count, cuts, build=one_process, **others):
    model = checkpoint(family, directory)
    asked = prompts(lengths)
    expected = [reference(model, prompt, count) for prompt in asked]
    assert len({token for row in expected for token in row}) > 30  # text that says something
    for cut in cuts:
        fields, tight = CUTS[cut]
        engine, close = build(
            ServeJob.model_validate(
                {"model": str(directory), "kv_tokens": 4096, "threads": 1, **fields, **others}
            )
        )
        assert serve_all(engine, asked, max_tokens=count) == expected, cut
        stats = engine.stats()
        assert (stats["preemptions_total"] > 0) == tight, cut
        assert stats["blocks_used"] == 0
        if cut in ("whole", "chunked", "block-1"):  # now all of them lie in the cache
            before = stats["prefix_hit_tokens"]
            assert serve_all(engine, asked, max_tokens=count) == expected, cut
            hits = engine.stats()["prefix_hit_tokens"] - before
            assert hits > sum(lengths) // 2, cut
        close()


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers(family, tmp_path, serve_all):
    few = (1, 16, 17, 128, 160)
    agree(family, tmp_path / "m", serve_all, few, 16, ("chunked",))
    agree(family, tmp_path / "n", serve_all, few, 16, ("tiny-block-1",), kv_tokens=340)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers_in_full(family, tmp_path, serve_all):
    agree(family, tmp_path / "m", serve_all, LENGTHS, 64, CUTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers_by_two_ranks_and_by_four(family, tmp_path, serve_all):
    two = {"parallel": {"tp": 2}}
    cuts = ("whole", "no-reuse", "block-1", "tiny-cache")
    agree(family, tmp_path / "m", serve_all, LENGTHS, 64, cuts, ranks, **two)
    four = {"parallel": {"tp": 2, "pp": 2}}
    agree(family, tmp_path / "n", serve_all, LENGTHS[::2], 32, ("chunked",), ranks, **four)
