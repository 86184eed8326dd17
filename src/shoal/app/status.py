"""What a running server does now, and who owes whom: ``shoal serve status``."""

from __future__ import annotations

from http import HTTPStatus

from shoal.app.show import Format, as_json, table
from shoal.core.errors import ServeError
from shoal.core.extras import import_extra

_SHOWN = (
    ("num_requests_running", "running requests"),
    ("num_requests_waiting", "waiting requests"),
    ("kv_cache_blocks", "cache blocks"),
    ("kv_cache_usage_perc", "share of blocks in use"),
    ("num_preemptions_total", "preempted requests"),
)


def status(
    host: str,
    port: int,
    key: str | None,
    output: Format = Format.text,
    *,
    timeout_s: float = 10.0,
) -> None:
    """Show gauges of a server, and the debts of its instances.

    Args:
        host: of the server.
        port: of the server.
        key: that it wants, or None.
        output: text or JSON.
        timeout_s: s to wait for it.

    Raises:
        ServeError: there is no server, or it refuses.
    """
    purpose = "the status of a server"
    httpx2 = import_extra("httpx2", extra="run", purpose=purpose)
    parser = import_extra("prometheus_client.parser", extra="run", purpose=purpose)
    where = f"[{host}]" if ":" in host else host
    try:
        answer = httpx2.get(
            f"http://{where}:{port}/metrics",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            trust_env=False,
        )
    except (httpx2.HTTPError, httpx2.InvalidURL) as cause:
        raise ServeError(
            f"no server at {host}:{port} ({cause}); give its --host and --port"
        ) from cause
    if answer.status_code != HTTPStatus.OK:
        raise ServeError(
            f"the server at {host}:{port} answered {answer.status_code}, expected 200; give its "
            f"key with --api-key-file"
        )
    try:
        families = list(parser.text_string_to_metric_families(answer.text))
    except (ValueError, IndexError) as cause:
        raise ServeError(
            f"the server at {host}:{port} has no metrics ({cause}); is it shoal serve?"
        ) from cause
    samples = [one for family in families for one in family.samples]
    result = {
        one.name.removeprefix("shoal:"): one.value
        for one in samples
        if not one.labels.get("debtor")
    }
    gauges = {name: result[name] for name, _ in _SHOWN if name in result}
    loans = [
        (one.labels["debtor"], one.labels["creditor"], one.value)
        for one in samples
        if one.labels.get("debtor") and one.value
    ]
    if output is Format.json:
        names = ("debtor", "creditor", "blocks")
        as_json({**gauges, "loans": [dict(zip(names, loan, strict=True)) for loan in loans]})
        return
    table(
        f"server at {host}:{port}",
        ("what", "now"),
        [(says, f"{gauges[name]:g}") for name, says in _SHOWN if name in gauges],
    )
    if loans:
        rows = [(f"instance {one}", f"instance {other}", f"{n:g}") for one, other, n in loans]
        table("loans", ("debtor", "creditor", "blocks"), rows)
    else:
        table("loans", ("loans",), [("none",)])
