"""The tutorials and the README, command by command, as a reader would type them.

What only lasts is made shorter; nothing else is changed. A command that ends with ``&``
runs until the page ends, and what follows waits until it answers.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT, blocks

from own_home import own_home

SHORTER = {
    # The last evaluation reads every held-out file.
    "shoal train --minutes 3": "shoal train --minutes 0.05 --set evaluation.final=false",
    "claims run dissect": "claims run dissect --quick",
    # The tests themselves keep the machine busy; the numbers are not looked at.
    "shoal bench serve": "shoal bench serve --anyway",
}
# Installing and the two commands of the Makefile are what CI itself does.
ELSEWHERE = ("pip install", "make ", "git ")


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """("shell", line), ("python", text) and (a file's name, text) of a page, in order."""
    for block in blocks(page):
        if block.printed:
            continue
        if block.language == "python":
            yield "python", block.text
        elif title := re.fullmatch(r'title="([\w.-]+)"', block.title):
            yield title.group(1), block.text
        elif block.language == "shell":
            for line in block.text.replace("\\\n", " ").splitlines():
                command = line.partition("  #")[0].strip()
                if command and not command.startswith(("#", *ELSEWHERE)):
                    yield "shell", command


def shortened(command: str) -> str:
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    return command


def wait_for(port: int, child: subprocess.Popen[str]) -> None:
    for _ in range(600):
        assert child.poll() is None, f"ended with status {child.returncode}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except urllib.error.HTTPError as answer:
            if answer.code < 500:
                return  # it answers, if only to say that a token is missing
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail(f"nothing answers on port {port}")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all pages: the corpus is made into tokens once, kernels are compiled once."""
    base = tmp_path_factory.getbasetemp()
    # Workers' directories lie beside each other.
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "home-of-pages"


def environment_of(home: Path, tmp_path: Path) -> dict[str, str]:
    """A directory as a reader has it."""
    for name in ("results", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "SHOAL_HOME": own_home(home), "PATH": path}


def follow(pages: list[Path], home: Path, tmp_path: Path) -> None:
    """Do what the pages say, in one directory; what was started is ended."""
    environment = environment_of(home, tmp_path)
    running: list[subprocess.Popen[str]] = []
    try:
        for page in pages:
            for kind, text in steps(page):
                began = time.monotonic()
                if kind not in ("python", "shell"):
                    (tmp_path / kind).write_text(text)
                elif text.endswith("&"):
                    running.append(start(text, tmp_path, environment))
                else:
                    run(kind, text, tmp_path, environment)
                print(f"{time.monotonic() - began:6.1f} s  {text.splitlines()[0]}")
    finally:
        for child in running:
            os.killpg(child.pid, signal.SIGINT)
        for child in running:
            child.wait(timeout=60)


def start(text: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a server; returns when it answers."""
    match = re.search(r"--port (\d+)", text)
    assert match, f"{text}: give the port"
    words = ["bash", "-c", f"exec {shortened(text).removesuffix('&')}"]
    child = subprocess.Popen(words, cwd=folder, env=environment, text=True, start_new_session=True)
    wait_for(int(match.group(1)), child)
    return child


def run(kind: str, text: str, folder: Path, environment: dict[str, str]) -> None:
    """Run a command or a block to its end; it must end well."""
    words = [sys.executable, "-c", text] if kind == "python" else ["bash", "-c", shortened(text)]
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    # Status 1 of these is a result: something needs a fix, or does not fit.
    allowed = (0, 1) if "shoal doctor" in text or "--fit" in text else (0,)
    assert done.returncode in allowed, (text, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr, (text, done.stderr)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(600)
def test_the_tutorials_run(home: Path, tmp_path: Path) -> None:
    pages = [DOCS / "tutorials" / f"{name}.md" for name in ("first-run", "serve-and-look")]
    follow(pages, home, tmp_path)
    assert (tmp_path / "runs" / "second" / "report.html").exists()
    assert (tmp_path / "gallery" / "index.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_tutorial_of_planning_runs(home: Path, tmp_path: Path) -> None:
    follow([DOCS / "tutorials" / "plan-a-cluster.md"], home, tmp_path)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.timeout(600)
def test_the_readme_runs(home: Path, tmp_path: Path) -> None:
    follow([ROOT / "README.md"], home, tmp_path)


def test_every_tutorial_is_followed() -> None:
    names = {page.stem for page in (DOCS / "tutorials").glob("*.md")}
    assert names == {"first-run", "serve-and-look", "plan-a-cluster"}
    for name in names:
        assert len(list(steps(DOCS / "tutorials" / f"{name}.md"))) > 4
