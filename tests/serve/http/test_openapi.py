"""The OpenAPI document is true: whatever it allows or forbids gets a status that it names."""

from __future__ import annotations

import json

import pytest

from shoal.serve.http.api import ROUTES
from shoal.serve.http.errors import TYPES
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openapi import document

pytestmark = pytest.mark.multi

DOCUMENT = document(ROUTES, HttpLimits(), "bytes")


def test_every_endpoint_and_every_status(call):
    status, data = call("GET", "/openapi.json")
    assert status == 200
    assert json.loads(data) == DOCUMENT
    there = {(method.upper(), path) for path, ops in DOCUMENT["paths"].items() for method in ops}
    assert there == set(ROUTES)
    named = {
        int(status)
        for operations in DOCUMENT["paths"].values()
        for operation in operations.values()
        for status in operation["responses"]
    }
    assert named == {200, *TYPES} - {422}


@pytest.mark.slow
def test_no_case_surprises_the_server(server, record_property):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_dict(DOCUMENT)
    schema.config.update(base_url=server.url)
    cases = dict.fromkeys(ROUTES, 0)

    def sender(operation, mode):
        allowed = {int(status) for status in operation.definition.raw["responses"]}

        @settings(
            max_examples=20,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case):
            if isinstance(case.body, dict):
                case.body["max_tokens"] = 2
            answer = case.call(timeout=30)
            cases[operation.method.upper(), operation.path] += 1
            assert answer.status_code in allowed, answer.text
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        return send

    for result in schema.get_all_operations():
        operation = result.ok()
        sender(operation, schemathesis.GenerationMode.POSITIVE)()
        if operation.method.upper() == "POST":  # others have nothing that could be wrong
            sender(operation, schemathesis.GenerationMode.NEGATIVE)()
    assert all(cases[route] >= 20 for route in ROUTES if route[0] == "POST")
    record_property("figure", f"{sum(cases.values())} cases of {len(cases)} operations")
