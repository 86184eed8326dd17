"""Costs of a serving step: recovered coefficients, and bounds that follow from arithmetic."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError, MachineError
from shoal.core.random import generator
from shoal.cost.arithmetic import active_parameters, parameters
from shoal.cost.shapes import find
from shoal.cost.step_cost.fitted import FEATURES, FittedStepCost, StepSample, features, fit
from shoal.cost.step_cost.predicted import PredictedStepCost, predicted_step_cost
from shoal.cost.step_cost.roofline import (
    Roofline,
    activation_bytes,
    cache_bytes_per_token,
)
from shoal.ir import Machine, StepCost
from shoal.machine.described import load

TRUE = FittedStepCost(step=2e-3, token=3e-5, prompt_pair=4e-9, decode_key=5e-8, chunk=6e-6)


def shapes(number: int, seed: int = 0) -> list[list[tuple[int, int]]]:
    """Steps of many shapes: decodes, prompts, both."""
    random = generator(seed, purpose="shapes")
    out = []
    for _ in range(number):
        decodes = [(int(random.integers(1, 2000)), 1) for _ in range(random.integers(0, 65))]
        prompts = [
            (int(random.integers(0, 500)), int(random.integers(2, 512)))
            for _ in range(random.integers(0, 4))
        ]
        out.append([*decodes, *prompts] or [(0, 1)])
    return out


def samples(noise: float = 0.0) -> list[StepSample]:
    random = generator(5, purpose="noise")
    return [
        StepSample(
            chunks=tuple(chunks),
            seconds=TRUE.seconds(chunks) * float(np.exp(noise * random.standard_normal())),
        )
        for chunks in shapes(120)
    ]


def test_a_fit_finds_the_line_that_made_the_samples() -> None:
    result = fit(samples())
    for name in FEATURES:
        assert getattr(result, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert result.error_p90 < 1e-9
    assert result.samples == 120


def test_a_fit_says_how_far_off_it_is() -> None:
    """Errors of a log-normal spread of 10 %: the median is 0.67 of it, 90 % lie in 1.64."""
    result = fit(samples(0.1), machine="m", model="x", precision="fp32", threads=2)
    assert result.error_p50 == pytest.approx(0.067, rel=0.4)
    assert result.error_p90 == pytest.approx(0.164, rel=0.4)
    assert (result.machine, result.model, result.precision, result.threads) == ("m", "x", "fp32", 2)
    other = [(chunks, result.seconds(chunks) / TRUE.seconds(chunks)) for chunks in shapes(50, 9)]
    assert all(0.85 < ratio < 1.15 for _, ratio in other)


def test_no_coefficient_is_negative() -> None:
    """Steps that get cheaper with more chunks do not make a negative price."""
    odd = [
        StepSample(chunks=tuple([(10, 1)] * number), seconds=1.0 / number)
        for number in range(1, 30)
    ]
    result = fit(odd)
    assert all(getattr(result, name) >= 0 for name in FEATURES)
    assert result.seconds([(0, 1)]) > 0


def test_features_count_what_attention_sees() -> None:
    chunks = [(7, 1), (0, 4), (10, 3)]
    seen = [
        [start + place + 1 for place in range(length)] for start, length in chunks
    ]  # keys that each token attends to
    assert features(chunks) == (1.0, 8.0, sum(seen[1]) + sum(seen[2]), 8.0, 3.0)


def test_a_fit_is_saved_and_loaded(tmp_path: Path) -> None:
    result = fit(samples())
    result.save(tmp_path / "cost.yaml")
    assert FittedStepCost.load(tmp_path / "cost.yaml") == result
    cost: StepCost = result
    assert cost.seconds([(5, 1)]) > 0


def test_refuses_too_few_samples_and_impossible_ones() -> None:
    with pytest.raises(ConfigError, match="samples = 3: expected at least 10 measured steps"):
        fit(samples()[:3])
    for wrong in (
        StepSample(chunks=((0, 1),), seconds=0.0),
        StepSample(chunks=(), seconds=1.0),
    ):
        with pytest.raises(ConfigError, match=r"samples\[12\].*leave empty steps out"):
            fit([*samples()[:12], wrong])
    with pytest.raises(ConfigError, match=r"nothing.yaml: cannot be read"):
        FittedStepCost.load(Path("nothing.yaml"))
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        FittedStepCost(step=-1, token=0, prompt_pair=0, decode_key=0, chunk=0)


H100 = load("H100")
LLAMA = find("Llama-3.1-8B")


def test_a_single_decode_reads_the_weights_once() -> None:
    """On a GPU: bytes over bandwidth, and little else."""
    terms = predicted_step_cost(H100, LLAMA, "bf16").terms([(0, 1)])
    bandwidth = H100.device.main_memory.read_bandwidth
    assert bandwidth is not None
    read = 2 * (parameters(LLAMA) - LLAMA.vocab_size * LLAMA.hidden) / bandwidth
    assert read < terms.memory < 1.4 * read
    assert terms.matmul == 0


def test_a_long_prompt_takes_its_flops_over_the_rate_of_large_products() -> None:
    terms = predicted_step_cost(H100, LLAMA, "bf16").terms([(0, 8192)])
    rate = H100.device.matmul_flops["bf16"]
    blocks = parameters(LLAMA) - 2 * LLAMA.vocab_size * LLAMA.hidden
    # Measured products keep up less than the best one: power limits them.
    assert 2 * 8192 * blocks / rate < terms.matmul < 1.3 * 2 * 8192 * blocks / rate
    assert terms.matmul > terms.memory


def test_a_batch_shares_the_weights_and_reads_its_own_keys() -> None:
    cost = predicted_step_cost(H100, LLAMA, "bf16")
    one, many = cost.terms([(4000, 1)]), cost.terms([(4000, 1)] * 64)
    assert many.memory < 1.2 * one.memory
    size = 64 * 4001 * cache_bytes_per_token(LLAMA, "bf16")
    assert size / 3.35e12 < many.attention < 1.5 * size / 3.35e12
    assert one.attention < many.attention / 10


def device(cost: PredictedStepCost, chunks: list[tuple[int, int]]) -> tuple[float, float, float]:
    """Seconds in which the device computes."""
    terms = cost.terms(chunks)
    return terms.matmul, terms.memory, terms.attention


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["laptop", "H100"])
def test_more_work_takes_longer(name: str, precision: str) -> None:
    cost = predicted_step_cost(load(name), find("Qwen3-0.6B"), precision)
    for fewer, more in itertools.pairwise(
        ([(0, 1)], [(0, 1)] * 4, [(500, 1)] * 4, [(500, 1)] * 16)
    ):
        # A GPU that waits for its operators takes as long for less.
        assert cost.seconds(fewer) <= cost.seconds(more) * (1 + 1e-9)
        assert sum(device(cost, fewer)) < sum(device(cost, more))
    for fewer, more in itertools.pairwise(([(0, 16)], [(0, 128)], [(0, 512)], [(2048, 512)])):
        assert sum(device(cost, fewer)) < sum(device(cost, more))
    terms = cost.terms([(500, 1)] * 4 + [(0, 32)])
    assert terms.total == pytest.approx(
        terms.matmul + terms.attention + terms.memory + terms.overhead
    )
    assert min(terms.matmul + terms.memory, terms.attention, terms.overhead) > 0


def test_few_tokens_read_few_experts() -> None:
    """A single token meets top_k experts; a crowd meets them all."""
    shape = find("Mixtral-8x7B-v0.1")
    cost = predicted_step_cost(H100, shape, "bf16")
    one, crowd = cost.terms([(0, 1)]), cost.terms([(0, 1)] * 64)
    ratio = active_parameters(shape) / parameters(shape)
    assert one.memory / (crowd.memory + crowd.matmul) == pytest.approx(ratio, rel=0.4)


def test_engines_of_a_cpu_differ_in_launches_and_products() -> None:
    machine, shape = load("laptop"), find("shoal-moe-4m")
    ours = predicted_step_cost(machine, shape, "fp32")
    theirs = predicted_step_cost(machine, shape, "fp32", engine="llamacpp")
    one, many = ours.terms([(8, 1)]), ours.terms([(0, 512)])
    # Experts that no token reaches launch nothing.
    assert one.overhead < 0.7 * many.overhead
    assert theirs.terms([(8, 1)]).overhead < 0.3 * one.overhead
    assert theirs.terms([(0, 512)]).matmul == pytest.approx(many.matmul / 0.4)


def test_fewer_threads_compute_slower() -> None:
    shape = find("Qwen3-0.6B")
    laptop = load("laptop")
    assert laptop.device.num_cores and laptop.device.num_cores > 1
    chunks = [(100, 1)] * 8
    one = Roofline(laptop, shape, "fp32", threads=1).terms(chunks)
    every = Roofline(laptop, shape, "fp32").terms(chunks)
    assert one.memory > every.memory
    assert one.matmul > every.matmul


def test_bytes_of_cache_and_activations() -> None:
    # Two tensors x 32 layers x 8 heads x 128 x 2 B.
    assert cache_bytes_per_token(LLAMA, "bf16") == 131_072
    assert cache_bytes_per_token(LLAMA, "fp32") == 262_144
    few, many = (activation_bytes(LLAMA, tokens, 8, "bf16") for tokens in (64, 512))
    assert 0 < few < many < 1e9


def test_refuses_other_precisions_and_machines_without_rates() -> None:
    laptop = load("laptop")
    for machine in (H100, laptop):
        with pytest.raises(ConfigError, match="precision = 'int4': expected fp32 or bf16"):
            predicted_step_cost(machine, LLAMA, "int4")
        raw: dict[str, Any] = machine.model_dump()
        raw["device"]["matmul_flops"] = raw["device"]["peak_flops"] = {}
        raw["device"]["matmul_flops_1core"] = {}
        with pytest.raises(MachineError, match="no rate for"):
            predicted_step_cost(Machine.model_validate(raw), LLAMA, "bf16")


# Tokens per second of one stream in 16 bits, of engines that are tuned for it:
# llama.cpp in the tables of GPU-Benchmarks-on-LLM-Inference (May 2024), and gpt-fast's README.
PUBLISHED = [
    ("Llama-3-8B", "RTX-4090", 54.34),
    ("Llama-3-8B", "L40S", 43.42),
    ("Llama-3.1-8B", "A100", 93.89),
    ("Llama-2-7b", "A100", 104.9),
]


@pytest.mark.parametrize(("model", "machine", "tokens_per_s"), PUBLISHED)
def test_decodes_of_one_stream_are_as_published(
    model: str, machine: str, tokens_per_s: float
) -> None:
    cost = predicted_step_cost(load(machine), find(model), "bf16", engine="vllm")
    assert 1 / cost.seconds([(300, 1)]) == pytest.approx(tokens_per_s, rel=0.12)
