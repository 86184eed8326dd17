"""What the package needs is declared, pinned, hashed and listed with its licence."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import re
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import sources
from docs_pages import ROOT, script

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Modules that no extra brings: other engines, run in environments of their own, and what is beside
# a file that runs there.
PEERS = {
    *("aiconfigurator", "gguf", "llama_cpp", "loop", "nncf", "onnxruntime_genai", "openvino"),
    *("openvino_genai", "optimum", "vllm"),
}
# Packages whose modules have another name, also where they are not installed.
MODULES = {"nvidia-ml-py": {"pynvml"}, "opentelemetry-api": {"opentelemetry"}}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    """Every package of the dependencies and of the extras of users."""
    extras = PROJECT["optional-dependencies"]
    users = [extras[name] for name in extras if name not in ("dev", "docs", "audit", "all")]
    lines = [*PROJECT["dependencies"], *(line for extra in users for line in extra)]
    return {canonical(re.split(r"[\[<>=!~; ]", line)[0]) for line in lines}


def imported(file: Path, known: set[str]) -> set[str]:
    """Top-level names of what a file imports, wherever in it, that are not known yet."""
    lines = re.findall(r"^\s*(?:from|import)\s+(\w+)", sources.text(file), re.MULTILINE)
    if known.issuperset(lines):
        return set()
    result = set()
    # Lines of a text may look like imports.
    for node in sources.nodes(file):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            result.add(node.module)
    return {name.partition(".")[0] for name in result} - known


def test_every_module_that_is_imported_is_declared() -> None:
    used: dict[str, Path] = {}
    for file in sources.paths():
        for name in imported(file, {"shoal", *sys.stdlib_module_names, *used}):
            used.setdefault(name, file)
    brings = {
        name: {canonical(one) for one in packages}
        for name, packages in importlib.metadata.packages_distributions().items()
    }
    for package, names in MODULES.items():
        for name in names:
            brings.setdefault(name, set()).add(package)
    allowed = declared()
    missing = {
        name: str(file.relative_to(sources.PACKAGE))
        for name, file in used.items()
        if name not in PEERS and not brings.get(name, {canonical(name)}) & allowed
    }
    assert missing == {}


def test_pins_with_hashes_are_those_of_the_constraints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = script("lock")
    assert lock.differing() == []
    # It would notice another version.
    for name in lock.HEADS:
        text = (lock.FOLDER / f"{name}.txt").read_text()
        (tmp_path / f"{name}.txt").write_text(text.replace("h11==0.", "h11==99."))
    monkeypatch.setattr(lock, "FOLDER", tmp_path)
    assert len(lock.differing()) == 1


def test_every_pin_has_a_hash_and_nothing_else_is_in_the_files() -> None:
    lock = script("lock")
    pin = re.compile(r"[a-z0-9-]+==[\w.+]+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n")
    for name in lock.HEADS:
        first, _, rest = (lock.FOLDER / f"{name}.txt").read_text().partition("\n")
        assert first.startswith("# Written by scripts/lock.")
        assert pin.sub("", rest) == ""


def test_the_files_with_hashes_have_all_that_the_extra_needs() -> None:
    lock = script("lock")
    pinned = lock.pins(lock.FOLDER / "run.txt") | lock.pins(lock.FOLDER / "cpu.txt")
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["run"]
    assert {canonical(re.split(r"[\[<>=!~; ]", line)[0]) for line in wanted} <= set(pinned)


def test_one_torch_satisfies_the_pins_of_both_builds() -> None:
    """The files on PyPI want one triton exactly; the constraints must have that one."""
    lock = script("lock")
    known = lock.pins(ROOT / "constraints.txt")
    cuda = lock.pins(lock.FOLDER / "cuda.txt")
    assert known["torch"] == cuda["torch"]
    assert known["triton"] == cuda["triton"]


def test_the_bill_of_materials_is_valid_and_complete() -> None:
    pytest.importorskip("cyclonedx")
    lock, sbom = script("lock"), script("sbom")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = json.loads(sbom.bill())
    assert (data["bomFormat"], data["specVersion"]) == ("CycloneDX", "1.6")
    listed = {one["name"]: one for one in data["components"]}
    for name, (version, _, files) in sbom.VENDORED.items():
        contained = listed.pop(name)
        assert contained["version"] == version and contained["purl"] == f"pkg:npm/{name}@{version}"
        assert len(contained["externalReferences"]) == len(files)
    pinned = lock.pins(lock.FOLDER / "run.txt") | lock.pins(lock.FOLDER / "cpu.txt")
    assert set(pinned) - set(listed) <= {"colorama"}  # Windows alone
    for name, one in listed.items():
        assert one["version"] == pinned[name]
        assert one["licenses"] and one["externalReferences"][0]["hashes"], name
    own = next(one for one in data["dependencies"] if one["ref"] == "shoal-ml")
    assert len(own["dependsOn"]) == len(
        PROJECT["dependencies"] + PROJECT["optional-dependencies"]["run"]
    )


def test_files_of_others_are_as_they_were_released() -> None:
    """The digests of the files in the package on npm."""
    sbom = script("sbom")
    digests = {
        "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
        "uPlot.LICENSE.txt": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    }
    assert {file for _, _, files in sbom.VENDORED.values() for file in files} == set(digests)
    for file, digest in digests.items():
        assert hashlib.sha256((sbom.ASSETS / file).read_bytes()).hexdigest() == digest
    for name, (version, licence, _) in sbom.VENDORED.items():
        assert f"/{name}) | {version} | {licence} |" in sbom.PAGE.read_text()


def test_licences_are_judged_by_what_they_say() -> None:
    sbom = script("sbom")
    assert sbom.permissive("Apache-2.0 AND (MIT OR BSD-3-Clause)")
    for text in ("GPL-3.0-only", "MIT AND LGPL-2.1", "AGPL-3.0", "not stated", "MPL-2.0"):
        assert not sbom.permissive(text)
    assert sbom.licence("numpy").startswith("BSD-3-Clause")
    assert sbom.licence("scipy") == "BSD-3-Clause"  # states its whole text


def test_the_page_of_licences_has_the_pinned_versions() -> None:
    """Which is what can be compared wherever; ``make sbom`` writes it from an environment."""
    lock, sbom = script("lock"), script("sbom")
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (\S+) \|", sbom.PAGE.read_text(), re.MULTILINE)
    known = lock.pins(ROOT / "constraints.txt")
    assert {name: version.removesuffix("+cpu") for name, version in rows} == {
        name: known[name] for name, _ in rows
    }
    assert set(sbom.locked()) <= {name for name, _ in rows}
