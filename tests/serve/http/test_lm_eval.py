"""Log likelihoods of a served model are those that transformers computes, request by request.

Once by the requests that lm-evaluation-harness sends, and once by the harness itself over two tasks
of local files.
"""

from __future__ import annotations

import json

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.multi, pytest.mark.slow]

POSITIONS = 256
CHOICES = [
    {"query": "The sea is", "choices": ["blue", "a colour", "grün"], "answer": 0},
    {"query": "Two and two make", "choices": ["five", "four", "a pair"], "answer": 1},
    {"query": "def double(x):\n    return", "choices": ["x", "2 * x", "None"], "answer": 1},
]
# The last is longer than the model: it is read in windows.
TEXTS = ["A short text.", "Fische: 🐟🐠", "It goes on and on, and never ends. " * 20]
MULTIPLE = """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: query
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
PERPLEXITY = """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: byte_perplexity}]
"""


@pytest.fixture(scope="module")
def directory(write_model):
    """A tiny model, with what transformers wants to know of its tokenizer."""
    made = write_model(POSITIONS)
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (made / "tokenizer_config.json").write_text(json.dumps(words))
    return made


@pytest.fixture(scope="module")
def url(directory):
    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, running

    # Prompts are computed in parts, beside each other.
    job = ServeJob(model=str(directory), threads=1, max_step_tokens=96, precision="fp32")
    with running(job, ServerOptions(port=0, name="tiny")) as server:
        yield server.url


@pytest.mark.parametrize("tokenized", [True, False])
def test_requests_of_the_harness(directory, url, caller, tokenized):
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(directory))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32)
    pairs = [(doc["query"], f" {choice}") for doc in CHOICES for choice in doc["choices"]]
    contexts = [tokenizer(context).input_ids for context, _ in pairs]
    wholes = [tokenizer(context + more).input_ids for context, more in pairs]
    prompt = wholes if tokenized else [context + more for context, more in pairs]
    payload = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    status, data = caller(url)("POST", "/v1/completions", {**payload, "seed": 1234, "echo": True})
    assert status == 200, data
    for choice, context, whole in zip(json.loads(data)["choices"], contexts, wholes, strict=True):
        with torch.inference_mode():
            logs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        own = [float(logs[place - 1, whole[place]]) for place in range(1, len(whole))]
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[0] is None
        # One entry for each token of the prompt and for the new one, which the harness leaves out.
        assert len(scores) == len(whole) + 1
        assert scores[1:-1] == pytest.approx(own, abs=1e-3)
        assert sum(scores[len(context) : -1]) == pytest.approx(
            sum(own[len(context) - 1 :]), abs=1e-3
        )
        for place, best in enumerate(choice["logprobs"]["top_logprobs"][1:-1], 1):
            assert max(best.values()) == pytest.approx(float(logs[place - 1].max()), abs=1e-3)


def evaluated(model, arguments, tasks, **options):
    """Task -> for each document its (log likelihood, greedy) or log likelihood."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    result = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["local_choice", "local_text"],
        task_manager=manager,
        bootstrap_iters=0,
        **options,
    )
    scores = result["results"]
    found = {
        name: [one["filtered_resps"] for one in sorted(samples, key=lambda one: one["doc_id"])]
        for name, samples in result["samples"].items()
    }
    return scores, found


@pytest.mark.parametrize("concurrent", [1, 4])
def test_the_harness_itself(directory, url, tmp_path, monkeypatch, concurrent):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, rows, words in (
        ("choice", CHOICES, MULTIPLE),
        ("text", [{"text": text} for text in TEXTS], PERPLEXITY),
    ):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{name}.yaml").write_text(words % data)
    served = {
        "model": "tiny",
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(directory),
        "tokenizer_backend": "huggingface",
        "num_concurrent": concurrent,
        "max_retries": 1,
        "max_length": POSITIONS,
    }
    here = {"pretrained": str(directory), "dtype": "float32", "max_length": POSITIONS - 2}
    scores, found = evaluated("local-completions", served, tmp_path)
    expected_scores, expected = evaluated("hf", here, tmp_path, device="cpu", batch_size=1)
    for ours, theirs in zip(found["local_choice"], expected["local_choice"], strict=True):
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        assert [value for value, _ in ours] == pytest.approx(
            [value for value, _ in theirs], abs=1e-3
        )
    # Of some 700 tokens: 1e-3 for each window of them.
    assert found["local_text"] == [pytest.approx(one, abs=4e-3) for one in expected["local_text"]]
    name = "byte_perplexity,none"
    perplexity = expected_scores["local_text"][name]
    assert scores["local_text"][name] == pytest.approx(perplexity, rel=1e-5)
    assert scores["local_choice"]["acc,none"] == expected_scores["local_choice"]["acc,none"]
