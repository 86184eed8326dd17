"""Several answers to one prompt, over HTTP: those of separate requests."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from shoal.ir import ServeJob
from shoal.serve.http.server import ServerOptions, running


@pytest.mark.slow
def test_choices_are_those_of_separate_requests_and_compute_the_prompt_once(
    model_directory, caller
):
    job = ServeJob(model=str(model_directory), threads=1)
    prompt = [(5 * place) % 200 for place in range(45)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 60, "ignore_eos": True}
    body |= {"temperature": 1.0, "return_token_ids": True}
    with running(job, ServerOptions(port=0)) as server:
        call = caller(server.url)

        def ask(**more):
            status, data = call("POST", "/v1/completions", {**body, **more})
            assert status == 200, data
            return [one["token_ids"] for one in json.loads(data)["choices"]]

        def metric(name):
            _, data = call("GET", "/metrics")
            lines = data.decode().splitlines()
            (line,) = [one for one in lines if one.startswith(f"shoal:{name}{{")]
            return float(line.split()[-1])

        together = ask(n=4, seed=9)
        assert metric("num_forks_total") == metric("copied_blocks_total") == 3
        assert metric("engine_prompt_tokens_total") == len(prompt) + 3
        (best,) = ask(best_of=3, seed=9)
        assert best in together[:3]
        assert metric("num_forks_total") == 5
        assert together == [ask(seed=9 + choice)[0] for choice in range(4)]
        assert len({tuple(tokens) for tokens in together}) == 4
