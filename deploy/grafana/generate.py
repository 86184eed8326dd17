"""Write the Grafana dashboard of a server: python deploy/grafana/generate.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PLACE = Path(__file__).with_name("shoal.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8

CHOSEN = 'model_name=~"$model"'


def shares(metric: str) -> dict[str, str]:
    """Quantiles of a histogram."""
    return {
        f"p{round(100 * share)}": f"histogram_quantile({share}, sum by (le) "
        f"(rate(shoal:{metric}_bucket{{{CHOSEN}}}[$__rate_interval])))"
        for share in (0.5, 0.9, 0.99)
    }


def rate(metric: str, by: str = "") -> str:
    """Growth of a counter, a second."""
    per = f" by ({by})" if by else ""
    return f"sum{per} (rate(shoal:{metric}{{{CHOSEN}}}[$__rate_interval]))"


def now(metric: str, by: str = "") -> str:
    """A gauge, summed over replicas."""
    per = f" by ({by})" if by else ""
    return f"sum{per} (shoal:{metric}{{{CHOSEN}}})"


# Title, unit, and what is drawn: legend -> query.
PANELS: list[tuple[str, str, dict[str, str]]] = [
    ("Time to first token", "s", shares("time_to_first_token_seconds")),
    ("Time between tokens", "s", shares("inter_token_latency_seconds")),
    ("Whole answers", "s", shares("e2e_request_latency_seconds")),
    ("In the queue", "s", shares("request_queue_time_seconds")),
    ("Computing prompts", "s", shares("request_prefill_time_seconds")),
    ("Generating", "s", shares("request_decode_time_seconds")),
    (
        "Requests",
        "short",
        {
            "running": now("num_requests_running"),
            "waiting": now("num_requests_waiting"),
            "open": now("num_requests_open"),
        },
    ),
    (
        "Tokens a second",
        "short",
        {
            "prompts": rate("prompt_tokens_total"),
            "answers": rate("generation_tokens_total"),
        },
    ),
    (
        "Answers by their end",
        "reqps",
        {"{{finished_reason}}": rate("request_success_total", "finished_reason")},
    ),
    (
        "Cache in use",
        "percentunit",
        {"{{replica}}": f"max by (replica) (shoal:kv_cache_usage_perc{{{CHOSEN}}})"},
    ),
    (
        "Prefix cache hit rate",
        "percentunit",
        {"share": f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}"},
    ),
    (
        "Preemptions and copies",
        "ops",
        {
            "preemptions": rate("num_preemptions_total"),
            "blocks out": rate("swap_out_blocks_total"),
            "blocks in": rate("swap_in_blocks_total"),
        },
    ),
    ("HTTP by status", "reqps", {"{{status}}": rate("http_requests_total", "status")}),
    (
        "Engines and replicas",
        "short",
        {
            "engines up": now("engine_up"),
            "replicas up": now("replica_up"),
            "engine restarts": now("engine_restarts_total"),
            "replica restarts": now("replica_restarts_total"),
        },
    ),
    (
        "Router",
        "ops",
        {
            "replica {{replica}}": rate("router_requests_total", "replica"),
            "asked again": rate("router_retries_total"),
            "streams resumed": rate("router_resumed_streams_total"),
        },
    ),
]


def panel(number: int, title: str, unit: str, queries: dict[str, str]) -> dict[str, Any]:
    """A graph."""
    column, row = number % 3, number // 3
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(queries.items())
        ],
    }


def dashboard() -> dict[str, Any]:
    """The whole of it."""
    return {
        "uid": "shoal-serving",
        "title": "Shoal",
        "tags": ["shoal"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": "label_values(shoal:engine_up, model_name)",
                    "includeAll": True,
                    "multi": True,
                    "refresh": 2,
                },
            ]
        },
        "panels": [panel(number, *rest) for number, rest in enumerate(PANELS)],
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
