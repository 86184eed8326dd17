"""What a running server does now, and who owes whom: ``shoal serve status``."""

from __future__ import annotations

import http
import http.client

from shoal.app.show import table
from shoal.core.errors import ServeError

__all__ = ["status"]

_SHOWN = (
    ("num_requests_running", "requests that run"),
    ("num_requests_waiting", "requests that wait"),
    ("kv_cache_blocks", "blocks of cache"),
    ("kv_cache_usage_perc", "share of them in use"),
    ("num_preemptions_total", "requests that gave way"),
)


def status(host: str, port: int, key: str | None, *, timeout_s: float = 10.0) -> None:
    """Show gauges of a server, and the debts of its instances.

    Args:
        host: of the server.
        port: of the server.
        key: that it wants, or None.
        timeout_s: s to wait for it.

    Raises:
        ServeError: there is no server, or it refuses.
    """
    from prometheus_client.parser import text_string_to_metric_families

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics", headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
    except (OSError, http.client.HTTPException) as cause:
        raise ServeError(
            f"no server answers at {host}:{port} ({cause}); give its --host and --port"
        ) from cause
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise ServeError(
            f"the server at {host}:{port} answered {answer.status}: expected 200; give its key by "
            "--api-key-file"
        )
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    result = {
        one.name.removeprefix("shoal:"): one.value
        for one in samples
        if not one.labels.get("debtor")
    }
    table(
        f"server at {host}:{port}",
        ("what", "now"),
        [(says, f"{result[name]:g}") for name, says in _SHOWN if name in result],
    )
    debts = [
        (f"instance {one.labels['debtor']}", f"instance {one.labels['creditor']}", f"{one.value:g}")
        for one in samples
        if one.labels.get("debtor") and one.value
    ]
    if debts:
        table("loans", ("debtor", "creditor", "blocks"), debts)
    else:
        table("loans", ("loans",), [("none",)])
