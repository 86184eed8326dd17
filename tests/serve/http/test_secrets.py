"""The key and the prompts stay where they belong: not in logs, errors, numbers or process lists."""

from __future__ import annotations

import hmac
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from own_home import own_home

pytestmark = pytest.mark.multi

KEY = "kestrel-9f31-never-to-be-shown"
PROMPT = "the walrus of Tromso sings at noon"


def test_keys_are_compared_in_constant_time_whatever_their_length(serve_fake, caller, monkeypatch):
    """Each check is one ``compare_digest`` of digests, which have one length."""
    compared = []
    compare = hmac.compare_digest

    def watched(given, wanted):
        compared.append((len(given), len(wanted)))
        return compare(given, wanted)

    with serve_fake(key=KEY) as server:
        call = caller(server.url)
        monkeypatch.setattr(hmac, "compare_digest", watched)
        wrong = ["", "k", KEY[:-1], KEY + "x", KEY[:-1] + "X", "x" * 4000]
        for text in wrong:
            headers = {"Authorization": f"Bearer {text}"}
            assert call("GET", "/v1/models", headers=headers)[0] == 401
        assert call("GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"})[0] == 200
    assert len(compared) == len(wrong) + 1
    assert len(set(compared)) == 1
    assert len(set(compared[0])) == 1


def ask(url, path, key, body=None):
    """(status, everything that came back)."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, f"{answer.headers}{answer.read().decode()}"
    except urllib.error.HTTPError as cause:
        with cause:
            return cause.code, f"{cause.headers}{cause.read().decode()}"


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_neither_key_nor_prompt_is_shown_anywhere(model_directory, tmp_path, replicas):
    """Of a server as a user starts it: its command lines, output, errors, metrics and files."""
    (tmp_path / "temporary").mkdir()
    words = [sys.executable, "-m", "shoal", "serve", str(model_directory), "--port", "0", "-q"]
    words += ["--replicas", str(replicas)] if replicas > 1 else []
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "SHOAL_API_KEY": KEY,
            "SHOAL_HOME": own_home(tmp_path / "home"),
            "TMPDIR": str(tmp_path / "temporary"),
        },
    ) as process:
        try:
            said = []
            for line in process.stdout:
                said.append(line)
                if "http://127.0.0.1:" in line:
                    break
            assert "http://" in said[-1], said
            url = "http://127.0.0.1:" + said[-1].partition("http://127.0.0.1:")[2].split()[0]
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
            answers = [
                ask(url, "/v1/completions", KEY, body),
                ask(url, "/v1/completions", KEY, {**body, "max_tokens": "many"}),
                ask(url, "/v1/completions", KEY, {**body, "prompt": [PROMPT, 3]}),
                ask(url, "/v1/completions", KEY, {**body, "max_tokens": 10**9}),
                ask(url, "/v1/completions", KEY + "x", body),
                ask(url, "/metrics", KEY),
                ask(url, "/version", KEY),
                ask(url, "/nothing", KEY),
            ]
            assert [status for status, _ in answers[:2]] == [200, 400]
            family = [psutil.Process(process.pid)]
            family += family[0].children(recursive=True)
            assert len(family) > replicas
            lines = [" ".join(one.cmdline()) for one in family]
            # An engine that nobody can ask needs no key.
            engines = [one for one in family[1:] if KEY in "\0".join(one.environ().values())]
            # An engine dies: what is said about it has no word of what it was asked.
            os.kill(family[-1].pid, signal.SIGKILL)
            ask(url, "/v1/completions", KEY, body)
            process.send_signal(signal.SIGTERM)
            said.append(process.communicate(timeout=60)[0])
        finally:
            process.kill()
    assert engines == []
    shown = [*said, *lines, *(text for _, text in answers)]
    shown += [
        path.read_bytes().decode("latin-1")
        for folder in ("home", "temporary")
        for path in Path(tmp_path / folder).rglob("*")
        if path.is_file()
    ]
    assert [text[:2000] for text in shown if KEY in text] == []
    assert [text for text in [*said, *lines] if PROMPT in text] == []
    assert [text for _, text in answers[5:] if PROMPT in text] == []
