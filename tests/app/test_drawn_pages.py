"""Drawn bad addresses and chats: the dashboard answers each with a page that says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from dash_home import BASE, client_of
from dash_home import settings as settings_of
from dash_serve import serving
from drawn_input import BAD, limited, values
from starlette.testclient import TestClient

from drawn import STEADY
from shoal.app.dash.guard import CHAT
from shoal.cost.score import run_id
from shoal.serve.watch.upstream import Upstream

pytestmark = pytest.mark.usefixtures("environment")

# Page -> fields of its address. Of the explorers' pages one is always bad: a good question takes
# seconds to answer.
FIELDS = {
    "/runs": ("q", "page"),
    "/plans": ("page",),
    "/score": ("quantity", "page"),
    "/compare": ("a", "b"),
    "/compare/live": ("a", "b"),
    "/compare/curves": ("a", "from", "to"),
    "/runs/{run}/curves": ("from", "to"),
    "/runs/{run}/timeline": ("start", "from", "to", "ranks"),
    "/goodput/live": ("model", "machine", "workload", "ttft", "tpot", "share", "rate"),
    "/goodput/curves": ("machine", "ttft", "tpot", "share", "rate"),
    "/goodput": ("ttft", "tpot", "share"),
    "/explore": ("seq_len", "tokens", "global_batch"),
    "/runs/{word}": (),
    "/plans/{word}": (),
    "/plans/file/{word}": (),
    "/claims/{word}": (),
    "/claims/room/{word}": (),
    "/claims/results/{word}": (),
    "/assets/{word}": (),
    "/{word}": (),
}
WRONG = {"/explore": {"machine": "../x"}, "/goodput": {"workload": "none"}}
words = st.sampled_from([*(word for word in BAD if len(word) < 100), "\0", "1e999", "9" * 5000])
addresses = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda page: st.tuples(
        st.just(page),
        words,
        st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS[page], words)),
    )
)
chats = st.one_of(
    values,
    st.fixed_dictionaries({"model": values, "messages": values}),
    st.fixed_dictionaries(
        {
            "model": st.sampled_from(["tiny", "", "\ud800", 3, None, "x" * 5000]),
            "messages": st.lists(
                st.fixed_dictionaries(
                    {
                        "role": st.sampled_from(
                            ["user", "user", "assistant", "system", 1, ["user"]]
                        ),
                        "content": st.sampled_from(["a", "", " ", "\ud800", "\0", 1, None, ["a"]]),
                    }
                ),
                max_size=3,
            ),
        }
    ),
)
bodies = st.one_of(
    chats.map(lambda value: json.dumps(value).encode()),
    st.sampled_from(
        [b"", b"{", b"\xff", b"NaN", b"[" * 100_000, b'{"model":' * 50_000, b"1" * 5000]
    ),
)


@pytest.fixture(scope="module")
def chatting(home: Path) -> Iterator[TestClient]:
    """A browser that looks at a dashboard with a server."""
    with serving() as port:
        yield client_of(settings_of(home, server=Upstream(f"http://127.0.0.1:{port}")))


@settings(max_examples=100, **STEADY)
@given(addresses)
@example(("/plans/file/{word}", "9" * 5000, {}))
def test_bad_addresses(chatting: TestClient, home: Path, drawn: tuple[str, str, Any]) -> None:
    page, word, query = drawn
    path = page.replace("{run}", run_id(home / "runs" / "done"))
    if "{word}" in page:
        word = "".join(f"%{byte:02x}" for byte in word.encode())
        path = page.replace("{word}", word)
    with limited(drawn):
        answer = chatting.get(path, params={**WRONG.get(page, {}), **query} or None)
    assert answer.status_code in (200, 307, 400, 404, 422), (drawn, answer.status_code)
    assert "Traceback" not in answer.text


@settings(max_examples=60, **STEADY)
@given(bodies, st.sampled_from(["application/json", "application/x-www-form-urlencoded", "", "x"]))
def test_bad_chats(chatting: TestClient, body: bytes, kind: str) -> None:
    with limited(body):
        answer = chatting.post(CHAT, content=body, headers={"content-type": kind, "origin": BASE})
    assert answer.status_code in (200, 400, 413)
    assert "Traceback" not in answer.text
