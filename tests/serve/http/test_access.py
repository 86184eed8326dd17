"""Who may call: key, Host, Origin, address."""

from __future__ import annotations

import pytest

from shoal.core.errors import ServeError
from shoal.serve.http.guard import AccessControl, is_loopback

KEY = "correct-horse-7"
BODY = {"model": "bytes", "prompt": "ab", "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(serve_fake):
    options = {
        "key": KEY,
        "hosts": ("served.example",),
        "origins": ("http://page.example:3000",),
    }
    with serve_fake(**options) as running:
        yield running


def routes():
    from shoal.serve.http.api import ROUTES

    return [*ROUTES, ("GET", "/nothing"), ("DELETE", "/v1/models"), ("POST", "/docs")]


@pytest.mark.multi
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": f"Bearer {KEY}x"},
        {"Authorization": "Bearer \xe9\xe9"},
        {"X-Api-Key": KEY},
    ],
)
def test_every_route_needs_the_key_but_health(guarded, caller, headers, record_property):
    call = caller(guarded.url)
    for method, path in routes():
        if path == "/health":
            assert call(method, path, headers=headers)[0] == 200
            continue
        status, error = call.error(method, path, headers=headers)
        assert (status, error["code"]) == (401, "invalid_api_key"), path
        assert error["type"] == "authentication_error"
        assert KEY not in error["message"]
        assert call.headers["www-authenticate"] == "Bearer"
    record_property("figure", f"{len(routes())} routes, each with 9 wrong keys")


@pytest.mark.multi
def test_the_key_lets_in(guarded, caller):
    from openai import AuthenticationError, OpenAI

    call = caller(guarded.url)
    headers = {"Authorization": f"Bearer {KEY}"}
    for path in ("/metrics", "/version", "/v1/models"):
        assert call("GET", path, headers=headers)[0] == 200
    base = f"{guarded.url}/v1"
    with OpenAI(base_url=base, api_key=KEY, max_retries=0) as client:
        assert client.completions.create(**BODY).choices[0].text == "ab"
    with (
        OpenAI(base_url=base, api_key="another-key", max_retries=0) as client,
        pytest.raises(AuthenticationError),
    ):
        client.completions.create(**BODY)


@pytest.mark.multi
@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://localhost:1", "https://page.example:3000", "x"],
)
def test_foreign_origins(guarded, caller, origin):
    call = caller(guarded.url)
    headers = {"Authorization": f"Bearer {KEY}", "Origin": origin}
    for method, path in routes():
        status, error = call.error(method, path, headers=headers)
        assert (status, error["code"]) == (403, "origin_not_allowed"), path
        assert error["type"] == "permission_error"
    assert call.error("OPTIONS", "/v1/completions", headers=headers)[0] == 403
    assert call("GET", "/version", headers={"Authorization": f"Bearer {KEY}"})[0] == 200


@pytest.mark.multi
def test_allowed_origins(guarded, caller):
    call = caller(guarded.url)
    page = {"Origin": "http://page.example:3000"}
    assert call("OPTIONS", "/v1/completions", headers=page)[0] == 204
    assert call.headers["access-control-allow-origin"] == page["Origin"]
    assert "authorization" in call.headers["access-control-allow-headers"].lower()
    key = {"Authorization": f"Bearer {KEY}"}
    assert call("POST", "/v1/completions", BODY, headers={**page, **key})[0] == 200
    assert call.headers["access-control-allow-origin"] == page["Origin"]
    assert call("GET", "/version", headers=page)[0] == 401
    own = {"Origin": guarded.url, **key}
    assert call("GET", "/version", headers=own)[0] == 200
    assert "access-control-allow-origin" not in call.headers


@pytest.mark.multi
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "a b"])
def test_foreign_hosts(guarded, caller, host):
    call = caller(guarded.url)
    for path in ("/health", "/v1/models"):
        status, error = call.error("GET", path, headers={"Host": host})
        assert status in (400, 403)
        assert error["code"] in ("host_not_allowed", "invalid_http")


@pytest.mark.multi
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:99", "[::1]:8000", "Served.Example:80"])
def test_known_hosts(guarded, caller, host):
    assert caller(guarded.url)("GET", "/health", headers={"Host": host})[0] == 200


def test_other_machines_need_a_key(serve_fake):
    with pytest.raises(ServeError, match=r"host = '0\.0\.0\.0': expected 127\.0\.0\.1, or an API"):
        serve_fake(host="0.0.0.0").__enter__()


@pytest.mark.multi
def test_with_a_key_every_address_is_fine(serve_fake, caller):
    with serve_fake(host="0.0.0.0", key=KEY) as server:
        call = caller(server.url.replace("0.0.0.0", "127.0.0.1"))
        headers = {"Authorization": f"Bearer {KEY}", "Host": "any.example"}
        assert call("GET", "/version", headers=headers)[0] == 200
        assert call("GET", "/version", headers={"Host": "any.example"})[0] == 401


@pytest.mark.parametrize("key", ["", "short", "with a space", "schlüssel-lang", "line\nbreak-long"])
def test_bad_keys(key):
    with pytest.raises(ServeError, match="at least 8 printable") as caught:
        AccessControl(key=key)
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize("origin", ["page.example", "ftp://x", "http://x/path", "*"])
def test_bad_origins(origin):
    with pytest.raises(ServeError, match="scheme and host"):
        AccessControl(origins=(origin,))


def test_loopback():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_port_in_use(serve_fake):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        from shoal.ir import ServeJob
        from shoal.serve.http.server import ServerOptions, running

        with (
            pytest.raises(ServeError, match=f"port = {port}: in use"),
            running(ServeJob(model="."), ServerOptions(port=port)),
        ):
            pytest.fail("it started")


def test_no_such_model():
    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, running

    with (
        pytest.raises(ServeError, match="no such directory"),
        running(ServeJob(model="nowhere"), ServerOptions(port=0)),
    ):
        pytest.fail("it started")
