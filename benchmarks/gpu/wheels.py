"""The packages that a GPU machine without a network lacks: fetched elsewhere, installed there.

It has torch with CUDA, Triton and transformers, and what these bring; nothing here imports more
than Python.
"""

from __future__ import annotations

import hashlib
import os
import site
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".gpu-venv"
PYTHON = "3.12"
# What Shoal's stages and tests import, and what that needs in turn.
PACKAGES = (
    *("annotated-doc", "annotated-types", "pydantic", "pydantic-core", "typing-inspection"),
    *("typer", "click", "rich", "shellingham", "markdown-it-py", "mdurl", "pygments"),
    *("psutil", "h11", "scipy", "jinja2", "markupsafe", "prometheus-client", "google-crc32c"),
    *("fastapi", "starlette", "uvicorn", "anyio", "idna", "httpx2", "httpcore2", "truststore"),
    *("opentelemetry-api", "pytest", "pytest-timeout", "iniconfig", "pluggy", "hypothesis"),
    *("sortedcontainers", "nvidia-ml-py", "torchao"),
)
# What torch and transformers have brought.
GIVEN = frozenset({
    *("torch", "triton", "transformers", "numpy", "packaging", "pyyaml", "typing-extensions"),
    *("safetensors", "tokenizers", "huggingface-hub", "fsspec"),
})  # fmt: skip


def download(directory: Path) -> None:
    """Fetch the wheels for Linux on x86-64, by the pins of ``constraints.txt``: all or none.

    Raises:
        CalledProcessError: pip has said why.
        OSError: the directory is none, or is not empty.
    """
    systems = ["manylinux2014_x86_64"]
    systems += [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".wheels-") as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        command += ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
        command += [f"--platform={system}" for system in systems]
        subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *PACKAGES], check=True)
        made = Path(place, "wheels")
        made.mkdir()
        for wheel in Path(place).glob("*.whl"):
            wheel.rename(made / wheel.name)
        if directory.exists():
            directory.rmdir()
        made.rename(directory)
    found = list(directory.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in found)
    print(f"{len(found)} wheels, {size / 1e6:.1f} MB, in {directory}")


def installed(directory: Path) -> Path:
    """The Python of an environment with these wheels beside what the system has.

    Made once for a set of wheels; an interrupted one is made again.
    """
    wheels = sorted(directory.glob("*.whl"))
    mark = hashlib.sha256("\n".join(wheel.name for wheel in wheels).encode()).hexdigest()
    python, stamp = VENV / "bin" / "python", VENV / "wheels"
    if not stamp.is_file() or stamp.read_text() != mark:
        print(f"installing {len(wheels)} wheels into {VENV}", flush=True)
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", "--system-site-packages", VENV], check=True
        )
        pip = [python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*pip, *wheels], check=True)
        # Python's own option leads past an environment that this one is made from.
        libraries = next(VENV.glob("lib/python*/site-packages"))
        outer = [path for path in site.getsitepackages() if Path(path).is_dir()]
        (libraries / "outer.pth").write_text("\n".join(outer) + "\n")
        fresh = stamp.with_suffix(".new")
        fresh.write_text(mark)
        fresh.replace(stamp)
    return python


def enter(directory: Path) -> None:
    """Go on in that environment; returns where this process is in it already."""
    python = installed(directory)
    if Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])
