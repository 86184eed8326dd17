"""The numbers of a server: the names of vLLM, read by Prometheus' own parser."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.serve.http.metrics import METRICS

pytestmark = pytest.mark.multi

# What dashboards of vLLM ask for, without its prefix.
OF_VLLM = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"],
    "counter": [
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
    ],
    "histogram": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ],
}


@pytest.fixture
def families(call):
    def read():
        text = call("GET", "/metrics")[1].decode()
        result = text_string_to_metric_families(text)
        return {family.name: family for family in result if not family.name.endswith("_created")}

    return read


def value(families, name, **labels):
    family = families["shoal:" + name.removesuffix("_count").removesuffix("_sum")]
    return sum(
        sample.value
        for sample in family.samples
        if sample.name.removesuffix("_total") == "shoal:" + name
        and labels.items() <= sample.labels.items()
    )


def test_names_and_kinds_of_vllm(families):
    result = families()
    for kind, names in OF_VLLM.items():
        for name in names:
            family = result[f"shoal:{name}"]
            assert (family.type, bool(family.documentation)) == (kind, True), name
            assert all(sample.labels["model_name"] == "bytes" for sample in family.samples)
    assert {f"{name}_total" if f.type == "counter" else name for name, f in result.items()} == set(
        METRICS
    )


def test_histograms_are_well_formed(call, families):
    call("POST", "/v1/completions", {"model": "bytes", "prompt": "ab", "max_tokens": 3})
    for name in OF_VLLM["histogram"]:
        samples = families()[f"shoal:{name}"].samples
        buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
        counts = [sample.value for sample in buckets]
        assert counts == sorted(counts)
        assert buckets[-1].labels["le"] == "+Inf"
        (count,) = [sample.value for sample in samples if sample.name.endswith("_count")]
        assert count == counts[-1] >= 1


def test_what_a_request_adds(call, families):
    before = families()
    body = {"model": "bytes", "prompt": "abcd", "max_tokens": 5, "n": 2}
    assert call("POST", "/v1/completions", body)[0] == 200
    after = families()

    def more(name, **labels):
        return value(after, name, **labels) - value(before, name, **labels)

    assert more("request_success", finished_reason="length") == 2
    assert more("prompt_tokens") == 8
    assert more("generation_tokens") == 10
    for name in OF_VLLM["histogram"]:
        expected = 8 if name.startswith(("inter_token", "time_per_output")) else 2
        assert more(f"{name}_count") == expected, name
    assert more("request_prompt_tokens_sum") == 8
    assert more("request_generation_tokens_sum") == 10
    assert more("request_params_n_sum") == 4
    assert more("request_params_max_tokens_sum") == 10
    parts = [more(f"request_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(more("e2e_request_latency_seconds_sum"))
    assert more("request_inference_time_seconds_sum") == pytest.approx(parts[1] + parts[2])
    assert more("time_per_output_token_seconds_sum") == more("inter_token_latency_seconds_sum")


def test_what_was_aborted_or_refused(call, families):
    import fake_engine

    before = families()
    body = {"model": "bytes", "prompt": [fake_engine.REFUSE], "max_tokens": 5}
    assert call("POST", "/v1/completions", body)[0] == 400
    gone = value(families(), "request_success", finished_reason="error")
    assert gone == value(before, "request_success", finished_reason="error") + 1
