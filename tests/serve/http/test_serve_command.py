"""``shoal serve``, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

import shoal_command

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.multi


def shoal(*arguments, **options):
    return shoal_command.shoal("serve", *arguments, **options)


def test_serves_until_it_is_stopped(model_directory):
    key = "a-key-of-mine"
    with subprocess.Popen(
        [sys.executable, "-m", "shoal", "serve", str(model_directory), "--port", "0", "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_API_KEY": key},
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), process.stderr.read()
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 5, "temperature": 0}
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer)["usage"]["total_tokens"] == 8
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_same_tokens_as_the_model_itself(model_directory):
    from openai import OpenAI

    from shoal.ir import ServeJob
    from shoal.model import huggingface
    from shoal.model.generate import generate
    from shoal.serve.http.server import running

    model = huggingface.read(model_directory).eval()
    prompts = [[1], list(range(1, 41)), [7, 7, 7], list(range(200, 20, -1))]
    job = ServeJob(model=str(model_directory), threads=1, max_step_tokens=32)
    with (
        running(job) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        answer = client.completions.create(
            model="tiny",
            prompt=prompts,
            max_tokens=48,
            temperature=0,
            logprobs=2,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            assert choice.token_ids == generate(model, prompt, 48, eos=())
            for top, logprob in zip(
                choice.logprobs.top_logprobs, choice.logprobs.token_logprobs, strict=True
            ):
                assert logprob == max(top.values())
        seeds = [
            client.completions.create(
                model="tiny", prompt="abc", max_tokens=20, seed=seed, n=2
            ).choices
            for seed in (5, 5, 6)
        ]
        texts = [[choice.text for choice in choices] for choices in seeds]
        assert texts[0] == texts[1] != texts[2]
        assert texts[0][0] != texts[0][1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no such directory"),
        (["{model}", "--host", "0.0.0.0"], "an API key"),
        (["{model}", "--api-key-file", "{short}"], "at least 8"),
        (["{model}", "--scheduler", "fcfz"], "did you mean 'fcfs'?"),
        (["{model}", "--set", "max_runing=3"], "did you mean 'max_running'?"),
        (["{model}", "--max-position", "999"], "at most 256"),
        (["{model}", "--allow-origin", "page"], "scheme and host"),
        (["{model}", "--api-key-file", "{open}"], "expected 0600"),
        (["{model}", "--api-key-file", "/nowhere"], "cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_status_2(model_directory, tmp_path, arguments, words):
    (tmp_path / "key").write_text("12345678")
    (tmp_path / "key").chmod(0o644)
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    names = {"model": model_directory, "open": tmp_path / "key", "short": tmp_path / "short"}
    done = shoal(*(word.format(**names) for word in arguments), "--port", "0", "-q")
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stdout == ""


def test_dry_run_shows_the_configuration(model_directory):
    done = shoal(str(model_directory), "--max-running", "7", "--dry-run")
    assert done.returncode == 0
    assert "max_running" in done.stdout
    assert "7" in done.stdout
