"""Every endpoint, field, error, cap and metric of the server is documented."""

from __future__ import annotations

import ast
import re
from dataclasses import fields

import pytest
import sources
from docs_pages import DOCS

pytest.importorskip("fastapi")

from shoal.serve.cluster.router_metrics import ROUTER_METRICS
from shoal.serve.http import openai
from shoal.serve.http.api import ROUTES, create_app
from shoal.serve.http.errors import TYPES
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.metrics import METRICS
from shoal.serve.http.openapi import document
from shoal.serve.http.responses import REFUSED_RESPONSES

TEXT = (DOCS / "reference" / "http.md").read_text()
SERVE = [path for path in sources.paths() if path.is_relative_to(sources.PACKAGE / "serve")]
READERS = ("get", "integer", "number", "flag")


def section(title: str) -> str:
    result = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert result, title
    return result


def arguments() -> set[str]:
    """First arguments of all calls of ``fields.get("...")`` and the like, which read requests."""
    arguments = set()
    # The files without such a call are not parsed while tests are collected.
    some = [path for path in SERVE if re.search(r"\bfields\s*\.", sources.text(path))]
    for node in (node for path in some for node in sources.nodes(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            first = node.args[0] if node.args else None
            ours = node.func.attr in READERS and ast.unparse(node.func.value) == "fields"
            if ours and isinstance(first, ast.Constant):
                arguments.add(str(first.value))
    return arguments


FIELDS = arguments()


def codes() -> set[str]:
    codes = set()
    for path in SERVE:
        for node in sources.nodes(path):
            if isinstance(node, ast.keyword) and node.arg == "code":
                words = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                codes |= {word for word in words if isinstance(word, str)}
    return codes


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_endpoint(method: str, path: str) -> None:
    assert f"| `{method} {path}` |" in section("Endpoints")


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_every_field(name: str) -> None:
    titles = "Fields of completions and chats", "Responses", "Embeddings", "Rerank", "Tokenization"
    assert f"| `{name}` |" in "".join(map(section, titles))


def test_every_field_is_in_the_openapi_document() -> None:
    shown: set[str] = set()
    for operations in document(ROUTES, HttpLimits(), "x")["paths"].values():
        for operation in operations.values():
            for body in operation.get("requestBody", {}).get("content", {}).values():
                shown |= set(body["schema"]["properties"])
    assert shown == FIELDS


def test_the_fields_were_found() -> None:
    assert {"prompt", "messages", "n", "stop", "stream", "temperature", "seed"} <= FIELDS


@pytest.mark.parametrize("name", sorted({*openai.REFUSED_TEXT, *openai.REFUSED_CHAT}))
def test_everything_that_is_refused(name: str) -> None:
    refused = section("Fields of completions and chats").partition("are errors:")[2]
    assert f"`{name}`" in refused


@pytest.mark.parametrize("name", sorted(REFUSED_RESPONSES))
def test_everything_that_responses_refuse(name: str) -> None:
    assert f"`{name}`" in section("Responses").partition("are errors:")[2]


def test_every_error() -> None:
    table = section("Errors")
    for status in TYPES:
        # 422 is what frameworks say of fields; here it is 400.
        assert status == 422 or f"| {status} |" in table
    for code in codes():
        assert f"`{code}`" in table, code


def test_every_cap() -> None:
    for cap in fields(HttpLimits):
        row = re.search(rf"^\| `{cap.name}` \| ([^|]+) \|", section("Limits"), re.M)
        assert row, cap.name
        shown = row.group(1).replace(",", "")
        number = float(shown.split()[0])
        number *= {"MiB": 2**20, "KiB": 2**10}.get(shown.split()[-1], 1)
        assert number == cap.default, cap.name


@pytest.mark.parametrize("name", [*METRICS, *ROUTER_METRICS])
def test_every_metric(name: str) -> None:
    assert f"| `{name}` |" in section("Metrics")


def test_the_list_of_metrics_is_whole() -> None:
    from shoal.ir import ServeJob
    from shoal.serve.engine.client import EngineClient
    from shoal.serve.http.metrics import Metrics

    text = Metrics(EngineClient(ServeJob(model=".")), "tiny").text().decode()
    shown = set(re.findall(r"^# TYPE (\S+) ", text, re.M))
    assert {name for name in shown if not name.endswith("_created")} == set(METRICS)


def test_the_list_of_routes_is_whole() -> None:
    from types import SimpleNamespace

    client = SimpleNamespace(model=SimpleNamespace(eos_ids=frozenset(), vocab_size=1))
    text = SimpleNamespace(eos_ids=frozenset)
    app = create_app(client, text, None, name="x")  # type: ignore[arg-type]
    there = {(method, route.path) for route in app.routes for method in route.methods}
    assert there == set(ROUTES)
