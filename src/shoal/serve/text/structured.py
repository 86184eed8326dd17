"""The form that an answer must have, in the fields of OpenAI and of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shoal.serve.http.fields import Fields, wrong

Form = tuple[str, Mapping[str, Any]]
"""The field that asked for it, and the form: see :mod:`shoal.serve.text.grammar`."""

_SHORT = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice"}
_MOST_CHOICES = 1000


def read_form(fields: Fields) -> Form | None:
    """The form of the answer, if the body asks for one.

    Raises:
        ApiError: it is not what it should be, or there are two.
    """
    forms: list[Form] = []
    response = fields.get("response_format")
    if response is not None:
        forms += _response_format(response)
    outputs = fields.get("structured_outputs")
    if outputs is not None:
        if not isinstance(outputs, dict):
            wrong("structured_outputs", outputs, "an object with json, regex or choice")
        for kind, value in outputs.items():
            if value is not None:
                where = f"structured_outputs.{kind[:40]}"
                if kind not in _SHORT.values():
                    wrong(where, value, "json, regex or choice")
                forms.append((where, {kind: _value(kind, value, where)}))
    for name, value in (
        ("guided_json", fields.get("guided_json")),
        ("guided_regex", fields.get("guided_regex")),
        ("guided_choice", fields.get("guided_choice")),
    ):
        if value is not None:
            forms.append((name, {_SHORT[name]: _value(_SHORT[name], value, name)}))
    if len(forms) > 1:
        wrong(forms[1][0], "a second form of the answer", f"nothing beside {forms[0][0]}")
    return forms[0] if forms else None


def _response_format(value: Any) -> list[Form]:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", {"json": {"type": "object"}})]
    if kind != "json_schema":
        wrong("response_format.type", kind, "text, json_object or json_schema")
    where = "response_format.json_schema"
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict):
        wrong(f"{where}.schema", schema, "a JSON schema, which is an object")
    return [(where, {"json": schema})]


def _value(kind: str, value: Any, where: str) -> Any:
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                wrong(where, value, "a JSON schema")
        if not isinstance(value, dict):
            wrong(where, value, "a JSON schema, which is an object")
    elif kind == "regex":
        if not isinstance(value, str) or not value:
            wrong(where, value, "a regular expression")
    else:
        good = isinstance(value, list) and 1 <= len(value) <= _MOST_CHOICES
        if not good or not all(isinstance(text, str) and text for text in value):
            wrong(where, type(value).__name__, f"a list of 1 to {_MOST_CHOICES} texts")
    return value
