"""Directories that callers may name: below one root, and nothing is told about the others."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from shoal.core.errors import ServeError
from shoal.serve.adapters.routes import AdapterPlaces
from shoal.serve.http.errors import ApiError
from shoal.serve.http.server import ServerOptions


def refusal(places, path):
    with pytest.raises(ApiError) as caught:
        places.find(path)
    assert (caught.value.status, caught.value.param) == (400, "lora_path")
    what, _, expected = str(caught.value).partition(": expected ")
    assert what.startswith("lora_path = ")
    return expected


@pytest.fixture
def home(tmp_path):
    for name in ("root/sql", "root/linked", "beside", "root-not"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "root/out").symlink_to(tmp_path / "beside")
    (tmp_path / "root/loop").symlink_to(tmp_path / "root/loop")
    (tmp_path / "beside/adapter_config.json").write_text("{}")
    (tmp_path / "root/linked/adapter_config.json").symlink_to(
        tmp_path / "beside/adapter_config.json"
    )
    (tmp_path / "in").symlink_to(tmp_path / "root")
    return tmp_path


def test_only_what_is_below_the_root(home):
    places = AdapterPlaces(str(home / "root"))
    wanted = str(home / "root/sql")
    for path in (wanted, "sql", "./sql/../sql", str(home / "in/sql")):
        assert places.find(path) == wanted
    refused = {
        refusal(places, path)
        for path in (
            str(home / "beside"),
            str(home / "nowhere"),
            str(home / "root-not"),
            str(home / "root/nowhere"),
            "../beside",
            "../nowhere",
            "/etc",
            "/etc/ssl",
            "/etc/nowhere",
            "out",
            "loop",
            "linked",
            "sql\0",
            "sql\ud800",
            "a" * 300,
        )
    }
    assert len(refused) == 1, "whether a path exists is not told"
    assert len({refusal(places, path) for path in (3, None, "", ["sql"])}) == 1


def test_without_a_root_only_what_the_server_was_started_with(home):
    places = AdapterPlaces(None, [str(home / "beside")])
    assert places.find(str(home / "beside")) == str(home / "beside")
    assert places.find(str(home / "root/out")) == str(home / "beside")
    assert len({refusal(places, str(home / name)) for name in ("root", "root/sql", "none")}) == 1
    assert len({refusal(places, path) for path in (str(Path.cwd()), "/", ".", "..")}) == 1


def test_a_root_that_is_not_there_is_refused(tmp_path):
    for options in ({"adapter_root": str(tmp_path / "x")}, {"adapter_root": "."}):
        with pytest.raises(ServeError, match="adapter_root"):
            ServerOptions(key="k", adapter_routes=options["adapter_root"] != ".", **options)


def test_routes_beside_replicas_are_refused(byte_model):
    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, serve

    options = ServerOptions(port=0, key="a-key-of-mine", adapter_routes=True)
    with pytest.raises(ServeError, match="adapter_routes = True: expected false with replicas"):
        serve(ServeJob(model=str(byte_model), replicas=2), options)
