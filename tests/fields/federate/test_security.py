"""Keys, TLS, and clients that join from elsewhere with data of their own."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
import time

import httpx2
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.fields.federate.test_server import coordinator_of, serving

import shoal
from driven_federations import info_of
from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.fields.federate import join
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.protocols import FederationError
from shoal.fields.federate.wire.keys import Keys, parse_address, read_keys, server_tls
from shoal.fields.federate.wire.server import FederationServer, listening

SECRET = "a key of sixteen".replace(" ", "-")


def keys_file(tmp_path, text, mode=0o600):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    file.chmod(mode)
    return file


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for this machine, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    place = tmp_path_factory.mktemp("tls")
    (place / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (place / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    return str(place / "cert.pem"), str(place / "key.pem")


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (f"c0: {SECRET}\n", 0o644, "chmod 600"),
        ("- a\n", 0o600, "no lines"),
        ("", 0o600, "no lines"),
        ("a: [\n", 0o600, "not YAML"),
        ("c0: short\n", 0o600, "16 to 256"),
        ("c0: 1234567890123456\n", 0o600, "16 to 256"),
        (f"'../c0': {SECRET}\n", 0o600, "no name"),
        (f"c0: {SECRET}\nc1: {SECRET}\n", 0o600, "the same key"),
        (f"c0: !!python/object/apply:os.system ['{SECRET}']\n", 0o600, "not YAML"),
    ],
)
def test_files_of_keys_that_are_refused(tmp_path, text, mode, says):
    with pytest.raises(FederationError, match=says):
        read_keys(keys_file(tmp_path, text, mode))


def test_keys_are_read_and_compared(tmp_path):
    assert read_keys(keys_file(tmp_path, f"c0: {SECRET}\n")) == {"c0": SECRET}
    with pytest.raises(FederationError, match="No such file"):
        read_keys(tmp_path / "nowhere")
    keys = Keys({"c0": SECRET})
    assert keys.holds("c0", f"Bearer {SECRET}")
    for name, given in (("c0", ""), ("c0", "Bearer "), ("c1", f"Bearer {SECRET}"), ("c1", "")):
        assert not keys.holds(name, given)


def test_addresses_that_others_reach_need_keys():
    for address in ("0.0.0.0:0", "[::]:8080", "192.168.1.2:80", "example.org:80"):
        with pytest.raises(ConfigError, match="there are no keys"):
            FederateJob(listen=address)
        FederateJob(listen=address, keys="keys.yaml")
    for address in ("127.0.0.1:0", "localhost:8080", "[::1]:0"):
        FederateJob(listen=address)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("here", "127.0.0.1", "127.0.0.1:99999", ":80", "::1:80", "a b:1"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_address(wrong)


def test_half_of_tls_and_keys_on_the_virtual_clock_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="needs both"):
        FederateJob(certfile="cert.pem")
    with pytest.raises(ConfigError, match="no client joins"):
        FederateJob(keys="keys.yaml", clock="virtual")
    with pytest.raises(FederationError, match="unencrypted key"):
        server_tls(str(tmp_path / "cert"), str(tmp_path / "key"))


def test_an_address_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(FederationError, match="choose another port"),
            listening(lambda: None, port=port),
        ):
            pass


def test_tls_is_spoken_and_nothing_else(certificate):
    coordinator = coordinator_of(table("client_scheduler").build("fedavg"), info_of({"a": 1}), [])

    def make():
        from shoal.fields.federate.exchange import Exchange

        exchange = Exchange(FederateJob(clients="1"), ("a",))
        return FederationServer(coordinator, exchange, {"a": SECRET}, lambda: False)

    with listening(make, certfile=certificate[0], keyfile=certificate[1]) as (_, url):
        headers = {"Authorization": f"Bearer {SECRET}"}
        trusting = ssl.create_default_context(cafile=certificate[0])
        where = f"{url}/v1/clients/a/join"
        answer = httpx2.post(where, headers=headers, verify=trusting, trust_env=False)
        assert answer.status_code == 200
        with pytest.raises(httpx2.TransportError):  # a certificate that nobody has signed
            httpx2.post(where, headers=headers, trust_env=False)
        with pytest.raises(httpx2.TransportError):
            httpx2.post(where.replace("https", "http"), headers=headers, trust_env=False)
        answer = httpx2.post(where, headers=headers, verify=trusting, trust_env=False)
        assert answer.status_code == 200  # it goes on


def test_samples_that_a_client_claims_are_bounded():
    coordinator = coordinator_of(
        table("client_scheduler").build("fedavg"), info_of({"a": 1, "b": 1}), []
    )
    with serving(coordinator, {"a": SECRET, "b": SECRET[::-1]}, elsewhere=True) as (_, url):
        headers = {"Authorization": f"Bearer {SECRET}"}
        for wrong in (b"", b"{}", b'{"samples": 0}', b'{"samples": 1e99}', b'{"samples": true}'):
            answer = httpx2.post(
                f"{url}/v1/clients/a/join", content=wrong, headers=headers, trust_env=False
            )
            assert answer.status_code == 409, wrong
        answer = httpx2.post(
            f"{url}/v1/clients/a/join", json={"samples": 7}, headers=headers, trust_env=False
        )
        assert answer.status_code == 200
        assert coordinator._known["a"].samples == 7


@pytest.mark.slow
@pytest.mark.parametrize("plane", ["direct", "lifl"])
def test_clients_with_data_of_their_own_join_over_tls(tmp_path, certificate, plane):
    names = ("c0", "c1")
    secrets = {name: f"{SECRET}-{name}" for name in names}
    file = keys_file(tmp_path, "".join(f"{name}: {key}\n" for name, key in secrets.items()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {
        "job": "federate", "clients": "2", "rounds": 3, "steps": 20, "lr": 0.5,
        "algorithm": "fedavg", "learner": "logistic", "listen": f"127.0.0.1:{port}",
        "keys": str(file),
        "plane": plane,
        "certfile": certificate[0], "keyfile": certificate[1], "budget_s": 120,
    }  # fmt: skip
    reports, failed = [], []

    def serve():
        try:
            reports.append(shoal.run(job, machine="laptop", directory=tmp_path / "run"))
        except BaseException as cause:
            failed.append(cause)

    train, _ = table("example_source").build("digits").load(0)
    server = threading.Thread(target=serve)
    server.start()
    deadline = time.monotonic() + 60
    while not failed:
        assert time.monotonic() < deadline
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.1)

    def take_part(at, **changes):
        given = {
            "name": names[at], "key": secrets[names[at]], "x": train.x[at::2], "y": train.y[at::2],
            "learner": "logistic", "cafile": certificate[0], **changes,
        }  # fmt: skip
        join(f"https://localhost:{port}", **given)

    with pytest.raises(FederationError, match="401"):
        take_part(0, key="another key")
    clients = [threading.Thread(target=take_part, args=(at,)) for at in (0, 1)]
    for client in clients:
        client.start()
    for thread in (*clients, server):
        thread.join(120)
        assert not thread.is_alive()
    assert not failed
    (report,) = reports
    assert report.measured["versions"] == 3
    assert report.measured["accuracy"] > 0.5
    assert "worst_client" not in report.measured


def test_examples_that_do_not_fit_are_an_error():
    x, y = np.zeros((3, 1, 8, 8), np.float32), np.zeros(2, np.int64)
    with pytest.raises(FederationError, match="3 of x and 2 of y"):
        join("https://localhost:1", name="a", key=SECRET, x=x, y=y, learner="logistic")
    with pytest.raises(FederationError, match="https://HOST:PORT"):
        join("localhost:1", name="a", key=SECRET, x=x[:2], y=y, learner="logistic")
